"""Attention as it is written down: scores, a mask, softmax in fp32, a weighted sum.

Decoding rows go together, padded to the longest; each row that passes more goes by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.engines.paged.batch import Batch


class Plain:
    """Implements `Attention` on any device. Subclasses replace `attend`."""

    name = "plain"
    capturable = False

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Attend in groups of rows."""
        made, rows = [], batch.num_decodes
        if rows:
            longest = max(batch.lengths[:rows])
            k, v = (gather(cache, batch.block_tables[:rows], longest) for cache in (keys, values))
            places = torch.arange(longest, device=q.device)
            mask = places[None, None, :] < batch.context_lens[:rows, None, None]
            made.append(self.attend(q[:rows, None], k, v, mask, scale)[:, 0])
        for row in range(rows, batch.num_rows):
            start, stop, length = batch.starts[row], batch.starts[row + 1], batch.lengths[row]
            table = batch.block_tables[row : row + 1]
            k, v = (gather(cache, table, length) for cache in (keys, values))
            ones = torch.ones(stop - start, length, dtype=torch.bool, device=q.device)
            mask = ones.tril(length - (stop - start))[None]
            made.append(self.attend(q[None, start:stop], k, v, mask, scale)[0])
        return made[0] if len(made) == 1 else torch.cat(made)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Return [rows, n, heads, d] of q likewise, k and v [rows, length, kv_heads, d].

        mask [rows, n, length] says what each token sees.
        """
        rows, n, heads, size = q.shape
        grouped = q.view(rows, n, k.shape[2], -1, size)
        scores = torch.einsum("rnkgd,rlkd->rkgnl", grouped, k).float() * scale
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        weights = scores.softmax(dim=-1).to(q.dtype)
        return torch.einsum("rkgnl,rlkd->rnkgd", weights, v).reshape(rows, n, heads, size)


def gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens of each row [rows, length, kv_heads, d].

    Where each row has one block, and the blocks stand side by side, they are read in place.
    """
    if cache.shape[1] < length:
        blocks = cache[table[:, : -(-length // cache.shape[1])].long()]
        return blocks.flatten(1, 2)[:, :length]
    first = table[:, 0].long()
    if not cache.is_cuda:  # on a GPU to look would be to wait
        low = int(first[0])
        if bool((first == torch.arange(low, low + len(first))).all()):
            return cache[low : low + len(first), :length]
    return cache[:, :length][first]
