"""The operations of a decoder layer in plain torch: any device, any precision.

`native.kernels` has the same in C++; each is checked against its namesake here. Rounding is as in
transformers: norms in fp32, then rounded, then multiplied by their weight.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headway.engines.paged.weights import Linear


class Ops(Protocol):
    """What a layer does beside attention. Inputs may be views with a row stride of their own."""

    name: str

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return what multiplies by a weight [out, in]: x [tokens, in] → [tokens, out]."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalise the last dimension."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add x into `residual` in place, and return the norm of the sum."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up."""

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor,
        keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """Turn q and k [tokens, heads, head_dim] by their tokens' angles [tokens, head_dim / 2].

        Returns q; k and v go into their `slots` of a layer's cache.
        """

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the first place of each row's largest logit."""


class TorchOps:
    """Implements `Ops`; `reorder` keeps weights in the order that a CPU multiplies them in."""

    name = "torch"

    def __init__(self, reorder: bool = False) -> None:
        self._reorder = reorder

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Keep the weight as it is, or reordered."""
        if self._reorder and weight.device.type == "cpu":
            return prepacked(weight, bias)
        return _plain(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add, then normalise."""
        residual += x
        return self.rms_norm(residual, weight, epsilon)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        return functional.silu(gate) * up

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor,
        keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """Turn the first half of each head against its second, then scatter rows."""
        cos, sin = cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)
        for part, cache in ((_turn(k, cos, sin), keys), (v, values)):
            cache.view(-1, *v.shape[1:]).index_copy_(0, slots, part)
        return _turn(q, cos, sin)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the first place of each row's largest logit."""
        return logits.float().argmax(dim=-1)


def prepacked(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a product with a bf16 weight in oneDNN's order; where there is none, with it as it is.

    The operations are those that torch's compiler calls for a weight that does not change.
    """
    ops = torch.ops.mkldnn
    if weight.dtype != torch.bfloat16:
        return _plain(weight, bias)
    try:
        packed = ops._reorder_linear_weight(weight)
        ops._linear_pointwise(weight[:1], packed, bias, "none", [], "")
    except (RuntimeError, AttributeError):  # a build or a processor without it
        return _plain(weight, bias)
    return lambda x: ops._linear_pointwise(x, packed, bias, "none", [], "")


def _plain(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
