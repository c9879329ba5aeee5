"""Which attention runs: the one that was asked for, or the best that is there."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from headway.engines.paged.attention import Attention
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.attention.sdpa import Sdpa

NAMES = ("auto", "plain", "sdpa", "native", "flex", "triton", "flash_attn")
# Modules beside this one that import what may not be there.
MODULES = {"flex": "flex", "triton": "triton_paged", "flash_attn": "flash_attn"}


def choose(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    native: Attention | None = None,
) -> Attention:
    """Return an attention by its name, for a cache of such blocks.

    `auto` is on a GPU triton, else flash_attn, else sdpa, and elsewhere `native` where it is given,
    else sdpa. Raises ValueError where the named one cannot be had here.
    """
    device = torch.device(device)
    if name == "auto":
        for candidate in ("triton", "flash_attn") if device.type == "cuda" else ("native",):
            try:
                return choose(candidate, device, dtype, head_dim, block_size, native)
            except ValueError:
                continue
        return Sdpa()
    if name in ("plain", "sdpa"):
        return Plain() if name == "plain" else Sdpa()
    if name == "native":
        if native is None:
            raise ValueError("attention native needs the compiled kernels, which are not here")
        return native
    if name not in MODULES:
        raise ValueError(f"attention is one of {', '.join(NAMES)}, not {name!r}")
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if name != "flex" and device.type != "cuda" and not interpreted:
        raise ValueError(f"attention {name} needs a GPU, and the device is {device.type}")
    try:
        module: Any = importlib.import_module(f"{__package__}.{MODULES[name]}")
    except ImportError as error:
        raise ValueError(f"attention {name} cannot be imported: {error}") from error
    refusal = module.refusal(dtype, head_dim, block_size)
    if refusal is not None:
        raise ValueError(refusal)
    made: Attention = module.make(device)
    return made
