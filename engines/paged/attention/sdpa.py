"""torch's scaled_dot_product_attention over keys and values that were gathered for it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from headway.engines.paged.attention.plain import Plain


class Sdpa(Plain):
    """Implements `Attention` on any device."""

    name = "sdpa"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attend with the query heads of a KV head as so many tokens: none is copied for each."""
        rows, n, heads, size = q.shape
        kv_heads = k.shape[2]
        folded = q.view(rows, n, kv_heads, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        wide = mask[:, None].repeat(1, 1, heads // kv_heads, 1)
        out = functional.scaled_dot_product_attention(
            folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=wide, scale=scale
        )
        return out.view(rows, kv_heads, -1, n, size).permute(0, 3, 1, 2, 4).reshape(q.shape)
