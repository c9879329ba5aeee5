"""Attention over a paged cache, behind one interface; which one runs is named in the report."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headway.engines.paged.batch import Batch


class Attention(Protocol):
    """Each token of a pass attends to its own sequence up to itself."""

    name: str
    capturable: bool  # whether a CUDA graph can hold it: it asks the host for no length

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Return [tokens, heads, head_dim], like q; the pass's own K and V are in the cache.

        `keys` and `values` are one layer's: [num_blocks, block_size, kv_heads, head_dim].
        """
