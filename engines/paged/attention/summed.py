"""Decode attention as products and sums, for a compiler to make loops of."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.engines.paged.batch import Batch


class Summed:
    """Implements `Attention` for rows that pass one token each; it asks the host for nothing.

    Compiled, neither what it gathers nor what it multiplies is ever written down.
    """

    name = "summed"
    capturable = True

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Return [rows, heads, head_dim], like q."""
        rows, heads, size = q.shape
        k, v = (_gather(cache, batch.block_tables) for cache in (keys, values))
        grouped = q.view(rows, k.shape[1], -1, 1, size).float()
        scores = (grouped * k.float()).sum(dim=-1) * scale
        seen = torch.arange(k.shape[3], device=q.device) < batch.context_lens[:, None]
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        weights = scores.softmax(dim=-1).to(q.dtype).float()
        return (weights[..., None] * v.float()).sum(dim=-2).to(q.dtype).view(rows, heads, size)


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """Return [rows, kv_heads, 1, tokens, head_dim] of the blocks in tables [rows, width]."""
    return cache[tables.long()].flatten(1, 2).transpose(1, 2)[:, :, None]
