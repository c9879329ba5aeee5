"""The forward pass of a decoder over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headway.engines.paged.attention import Attention
from headway.engines.paged.batch import Batch, Cache
from headway.engines.paged.memory import zeros
from headway.engines.paged.ops import Ops
from headway.engines.paged.weights import Layer, Linear, Shape, Weights


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer's matrices as its operations keep them, beside its norms."""

    layer: Layer
    qkv: tuple[Linear, ...]
    out: Linear
    gate_up: tuple[Linear, ...]
    down: Linear


class Decoder:
    """Weights, and the operations and the attention that they pass through."""

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        attention: Attention,
        timed: Callable[[str, Any], Any] = lambda part, function: function,
    ) -> None:
        self.weights = weights
        self._ops = ops
        self._attention = timed("attention", attention)

        def pack(weight: Tensor, bias: Tensor | None) -> Linear:
            linear: Linear = timed("weights", ops.pack(weight, bias))
            return linear

        self._head = pack(weights.head, None)
        self._layers = [
            PackedLayer(
                layer,
                layer.qkv.packed(pack),
                layer.out.packed(pack)[0],
                layer.gate_up.packed(pack),
                layer.down.packed(pack)[0],
            )
            for layer in weights.layers
        ]

    def hidden(self, batch: Batch, cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Pass the batch and fill the cache, layer by layer.

        Returns [S, hidden_size], normed, of `batch.last`.
        """
        weights, ops = self.weights, self._ops
        epsilon = weights.shape.norm_epsilon
        residual = weights.embedding[batch.ids]
        angles = weights.cos[batch.positions], weights.sin[batch.positions]
        x = ops.rms_norm(residual, weights.layers[0].input_norm, epsilon)
        for place, one in enumerate(self._layers):
            x = self._attend(one, x, angles, batch, cache[place])
            x = ops.add_rms_norm(x, residual, one.layer.post_norm, epsilon)
            x = one.down(ops.silu_mul(*_parts(one.gate_up, x)))
            if place + 1 < len(self._layers):
                x = ops.add_rms_norm(x, residual, self._layers[place + 1].layer.input_norm, epsilon)
        residual += x
        return ops.rms_norm(residual[batch.last], weights.norm, epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, vocab_size]."""
        return self._head(hidden)

    def _attend(
        self,
        one: PackedLayer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        shape, ops = self.weights.shape, self._ops
        q, k, v = split_heads(one.qkv, x, shape)
        if one.layer.q_norm is not None and one.layer.k_norm is not None:
            q = ops.rms_norm(q, one.layer.q_norm, shape.norm_epsilon)
            k = ops.rms_norm(k, one.layer.k_norm, shape.norm_epsilon)
        q = ops.rotate_write(q, k, v, *angles, batch.slots, *cache)
        return one.out(self._attention(q, *cache, batch, shape.scale).flatten(1))


def split_heads(qkv: tuple[Linear, ...], x: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [tokens, heads, head_dim], k and v; of one matrix they are views."""
    kv_size = shape.num_kv_heads * shape.head_dim
    if len(qkv) == 3:
        parts = [one(x) for one in qkv]
    else:
        parts = list(qkv[0](x).split((shape.num_heads * shape.head_dim, kv_size, kv_size), dim=-1))
    q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in parts)
    return q, k, v


def _parts(gate_up: tuple[Linear, ...], x: Tensor) -> tuple[Tensor, ...]:
    if len(gate_up) == 2:
        return gate_up[0](x), gate_up[1](x)
    gate, up = gate_up[0](x).chunk(2, dim=-1)
    return gate, up


def new_cache(shape: Shape, num_blocks: int, block_size: int, like: Tensor) -> Cache:
    """Return an empty cache on the device and in the precision of `like`."""
    sizes = (shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    if like.device.type == "cpu":
        return Cache(zeros(sizes, like.dtype), zeros(sizes, like.dtype))
    return Cache(like.new_zeros(sizes), like.new_zeros(sizes))
