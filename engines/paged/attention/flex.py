"""torch's FlexAttention over the contexts of all rows, gathered and put end to end."""

from __future__ import annotations

import warnings
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headway.engines.paged.batch import Batch


def refusal(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Return why FlexAttention cannot take such a cache, or None."""
    if head_dim >= 16 and head_dim & (head_dim - 1) == 0:
        return None
    return f"flex takes a head_dim that is a power of two, from 16 on, not {head_dim}"


def make(device: torch.device) -> Flex:
    """Return an attention for a device."""
    return Flex(compiled=device.type == "cuda")


class Flex:
    """Implements `Attention` on any device; compiled on a GPU alone."""

    name = "flex"
    capturable = False

    def __init__(self, compiled: bool) -> None:
        self._attend, self._mask = flex_attention, create_block_mask
        if compiled:
            self._attend = torch.compile(flex_attention, dynamic=True)
            self._mask = torch.compile(create_block_mask, dynamic=True)
        self._batch: Batch | None = None
        self._plan: tuple[Tensor, BlockMask] | None = None

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Attend with all rows at once."""
        if self._plan is None or self._batch is not batch:
            self._batch, self._plan = batch, self._lay_out(batch, keys.shape[1])
        slots, mask = self._plan
        k, v = (cache.flatten(0, 1)[slots].transpose(0, 1)[None] for cache in (keys, values))
        with warnings.catch_warnings():
            # It warns that it is not compiled: where that is so, it is meant.
            warnings.simplefilter("ignore", UserWarning)
            out = self._attend(
                q.transpose(0, 1)[None],
                k,
                v,
                block_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != keys.shape[2],
            )
        return out[0].transpose(0, 1)

    def _lay_out(self, batch: Batch, block_size: int) -> tuple[Tensor, BlockMask]:
        """Return the slots of all contexts end to end, and which token sees which of them."""
        device, total = batch.ids.device, sum(batch.lengths)
        rows = torch.arange(batch.num_rows, device=device)
        # The sizes are given, so that no device is asked for them.
        counts = torch.tensor([b - a for a, b in pairwise(batch.starts)]).to(device)
        firsts = torch.tensor([*accumulate(batch.lengths[:-1], initial=0)]).to(device)
        query_row = rows.repeat_interleave(counts, output_size=batch.num_tokens)
        key_row = rows.repeat_interleave(batch.context_lens, output_size=total)
        key_place = torch.arange(total, device=device) - firsts[key_row]
        slots = batch.block_tables[key_row, key_place // block_size] * block_size
        positions = batch.positions

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query_row[query] == key_row[key]) & (key_place[key] <= positions[query])

        mask = self._mask(sees, None, None, batch.num_tokens, total, device=device)
        return slots + key_place % block_size, mask
