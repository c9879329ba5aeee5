"""The compiled operations and attention behind the interfaces of the torch ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.engines.paged.batch import Batch
from headway.engines.paged.native.library import Library, check, rows_of
from headway.engines.paged.native.packing import Packer
from headway.engines.paged.ops import prepacked
from headway.engines.paged.weights import Linear

# With AVX512-BF16 our matrix product is the faster one at any number of rows; where there are
# matrix units (AMX), which it does not use, oneDNN's is beyond so many.
SMALL_ROWS = 32


class NativeOps:
    """Implements `ops.Ops` for float32 and bfloat16 on a CPU."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self.library = library
        self.packer = Packer(library)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Keep a bf16 weight in our order, in oneDNN's, or in both, for few rows and for many."""
        if weight.dtype != torch.bfloat16 or not self.library.fast_bf16 or weight.shape[1] % 2:
            return prepacked(weight, bias)
        small = PackedLinear(self.packer, weight, bias)
        if not has_matrix_units():
            return small
        large = prepacked(weight, bias)
        return lambda x: small(x) if len(x) <= SMALL_ROWS else large(x)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalise the last dimension of [rows, size] or [rows, heads, size]."""
        x, size = rows_of(x), x.shape[-1]
        check(weight, x.dtype, (size,), "a norm's weight")
        out = torch.empty(x.shape, dtype=x.dtype)
        heads = x.shape[1] if x.dim() == 3 else 1
        self._run(
            "rms_norm", x, x.data_ptr(), x.stride(0), weight.data_ptr(), len(x), heads, size,
            epsilon, out.data_ptr(),
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add x [rows, size] into `residual` in place, and return the norm of the sum."""
        x, (rows, size) = rows_of(x), x.shape
        check(residual, x.dtype, (rows, size), "the residual")
        check(weight, x.dtype, (size,), "a norm's weight")
        out = torch.empty(rows, size, dtype=x.dtype)
        self._run(
            "add_rms_norm", x, x.data_ptr(), x.stride(0), residual.data_ptr(), size,
            weight.data_ptr(), rows, size, epsilon, out.data_ptr(),
        )  # fmt: skip
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up of [rows, size]."""
        gate, up = rows_of(gate), rows_of(up)
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._run(
            "silu_mul", gate, gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0),
            *gate.shape, out.data_ptr(),
        )  # fmt: skip
        return out

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor,
        keys: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """Turn q and k [tokens, heads, head_dim] by their angles; k and v go into the cache."""
        out = torch.empty(q.shape, dtype=q.dtype)
        self._turn(q, cos, sin, None, out)
        self._turn(k, cos, sin, slots, keys)
        self._scatter(v, slots, values)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the first place of each row's largest logit."""
        logits = rows_of(logits)
        out = torch.empty(len(logits), dtype=torch.int64)
        self._run(
            "argmax", logits, logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr()
        )
        return out

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor | None, out: Tensor) -> None:
        x, (tokens, heads, dim) = rows_of(x), x.shape
        for angles in (cos, sin):
            check(angles, torch.float32, (tokens, dim // 2), "angles")
        places = None
        if slots is not None:
            check(out, x.dtype, (*out.shape[:2], heads, dim), "the cache")
            places = check(slots, torch.int64, (tokens,), "slots").data_ptr()
        self._run(
            "rotate", x, x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), places, tokens,
            heads, dim, out.data_ptr(), heads * dim,
        )  # fmt: skip

    def _scatter(self, x: Tensor, slots: Tensor, cache: Tensor) -> None:
        x, (tokens, heads, dim) = rows_of(x), x.shape
        check(cache, x.dtype, (*cache.shape[:2], heads, dim), "the cache")
        check(slots, torch.int64, (tokens,), "slots")
        self._run(
            "scatter", x, x.data_ptr(), x.stride(0), slots.data_ptr(), tokens, heads * dim,
            cache.data_ptr(),
        )  # fmt: skip

    def _run(self, name: str, x: Tensor, *arguments: Any) -> None:
        _function(self.library, name, x)(*arguments, torch.get_num_threads())


class NativeAttention:
    """Implements `attention.Attention`: reads the blocks where they lie."""

    name = "native"
    capturable = False

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Return [tokens, heads, head_dim], like q; the pass's own K and V are in the cache."""
        q, (tokens, heads, dim) = rows_of(q), q.shape
        blocks, block_size, kv_heads, _ = keys.shape
        for cache in (keys, values):
            check(cache, q.dtype, (blocks, block_size, kv_heads, dim), "the cache")
        check_tables(batch, block_size)
        if tokens != batch.num_tokens or heads % kv_heads or dim % 2:
            raise ValueError(f"q {tuple(q.shape)} does not fit {tuple(keys.shape)} or its pass")
        starts = (ctypes.c_int64 * len(batch.starts))(*batch.starts)
        out = torch.empty(q.shape, dtype=q.dtype)
        _function(self._library, "attention", q)(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(),
            batch.block_tables.data_ptr(), batch.block_tables.shape[1], block_size,
            ctypes.addressof(starts), batch.context_lens.data_ptr(), batch.num_rows, heads,
            kv_heads, dim, scale, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


class PackedLinear:
    """A matrix product with a weight in our order; packed when it is first used."""

    def __init__(self, packer: Packer, weight: Tensor, bias: Tensor | None) -> None:
        self._packer, self._weight, self._bias = packer, weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [rows, in] times the weight."""
        packed = self._packer.pack(self._weight, self._bias)
        x, (rows, size) = rows_of(x), x.shape
        if x.dtype != torch.bfloat16 or size != packed.matrix.k:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight {packed.matrix.k} wide")
        out = torch.empty(rows, packed.matrix.n, dtype=torch.bfloat16)
        self._packer.library.multiply_packed(
            packed.matrix, x.data_ptr(), x.stride(0), rows, out.data_ptr(), packed.matrix.n,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def has_matrix_units() -> bool:
    """Whether the processor multiplies bf16 tiles (AMX); a torch that cannot say has none."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked and asked())


def check_tables(batch: Batch, block_size: int) -> None:
    """Refuse block tables that are too narrow for their rows, and rows out of order."""
    rows, width = batch.num_rows, batch.block_tables.shape[1]
    check(batch.block_tables, torch.int32, (rows, width), "block_tables")
    check(batch.context_lens, torch.int32, (rows,), "context_lens")
    if len(batch.starts) != rows + 1 or min(batch.lengths) < 1:
        raise ValueError("a pass has a start for each row and its end, and no row without tokens")
    if max(batch.lengths) > width * block_size:
        raise ValueError(f"{width} blocks of {block_size} hold no {max(batch.lengths)} tokens")


def _function(library: Library, name: str, x: Tensor) -> Callable[..., Any]:
    try:
        return library.table(x.dtype)[name]
    except KeyError:
        raise ValueError(f"the native kernels know float32 and bfloat16, not {x.dtype}") from None
