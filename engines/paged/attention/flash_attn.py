"""The flash-attn package's kernels, which read a paged cache through its block tables."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from headway.engines.paged.batch import Batch


def refusal(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Return why the kernels cannot take such a cache, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash_attn computes in float16 and bfloat16, not in {str(dtype).split('.')[-1]}"
    if head_dim % 8 or head_dim > 256:
        return f"flash_attn takes a head_dim that 8 divides, up to 256, not {head_dim}"
    if block_size % 256:
        return f"flash_attn takes blocks of a multiple of 256 tokens, not of {block_size}"
    return None


def make(device: torch.device) -> FlashAttn:
    """Return an attention for a device."""
    return FlashAttn()


class FlashAttn:
    """Implements `Attention` on a GPU."""

    name = "flash_attn"
    capturable = True

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._bounds = torch.empty(0)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Attend with the rows that decode, then with the others."""
        made, decodes = [], batch.num_decodes
        if decodes:
            out = flash_attn_with_kvcache(
                q[:decodes, None],
                keys,
                values,
                cache_seqlens=batch.context_lens[:decodes],
                block_table=batch.block_tables[:decodes],
                softmax_scale=scale,
                causal=True,
            )
            made.append(out[:, 0])
        if decodes < batch.num_rows:
            starts, lengths = self._bounds_of(batch)
            out = flash_attn_varlen_func(
                q[decodes:],
                keys,
                values,
                cu_seqlens_q=starts,
                cu_seqlens_k=lengths,
                max_seqlen_q=max(b - a for a, b in pairwise(batch.starts[decodes:])),
                max_seqlen_k=max(batch.lengths[decodes:]),
                softmax_scale=scale,
                causal=True,
                block_table=batch.block_tables[decodes:],
            )
            made.append(out)
        return made[0] if len(made) == 1 else torch.cat(made)

    def _bounds_of(self, batch: Batch) -> Tensor:
        """Return where rows that do not decode start in q and in their contexts put end to end."""
        if self._batch is not batch:
            decodes = batch.num_decodes
            starts = [start - decodes for start in batch.starts[decodes:]]
            lengths = accumulate(batch.lengths[decodes:], initial=0)
            bounds = torch.tensor(
                [starts, [*lengths]], dtype=torch.int32, pin_memory=batch.ids.is_cuda
            )
            self._batch, self._bounds = batch, bounds.to(batch.ids.device, non_blocking=True)
        return self._bounds
