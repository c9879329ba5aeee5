"""Which attention runs: the one that was asked for, or the best that is there."""

from __future__ import annotations

import os

import torch

from headway.engines.paged.attention import Attention
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.attention.sdpa import Sdpa

NAMES = ("auto", "plain", "sdpa", "native", "triton")


def choose(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    native: Attention | None = None,
) -> Attention:
    """Return an attention by its name, for a cache of such blocks.

    `auto` is triton on a GPU and elsewhere `native`, each where it can be had, else sdpa. Raises
    ValueError where the named one cannot be had here.
    """
    device = torch.device(device)
    if name == "auto":
        try:
            best = "triton" if device.type == "cuda" else "native"
            return choose(best, device, dtype, head_dim, block_size, native)
        except ValueError:
            return Sdpa()
    if name in ("plain", "sdpa"):
        return Plain() if name == "plain" else Sdpa()
    if name == "native":
        if native is None:
            raise ValueError("attention native needs the compiled kernels, which are not here")
        return native
    if name != "triton":
        raise ValueError(f"attention is one of {', '.join(NAMES)}, not {name!r}")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"attention triton needs a GPU, and the device is {device.type}")
    try:
        from headway.engines.paged.attention import triton_paged
    except ImportError as error:
        raise ValueError(f"attention triton cannot be imported: {error}") from error
    refusal = triton_paged.refusal(dtype, head_dim, block_size)
    if refusal is not None:
        raise ValueError(refusal)
    made: Attention = triton_paged.make(device)
    return made
