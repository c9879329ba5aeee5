"""How large the cache may be, by what is free, given and of use; and memory on large pages."""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from headway.engines.paged.options import KIND, RUNGS, PagedOptions
from headway.engines.paged.scheduler import Policy
from headway.engines.paged.weights import Shape

GIB = 1 << 30
HUGE_PAGE = 1 << 21
# Of what is free once the weights are there. A GPU is ours alone, and what a pass needs beside the
# cache fits into the rest; a CPU's memory is everybody's.
SHARES = {"cuda": 0.85, "cpu": 0.25}
# Tokens of a pass, where a suite does not say: as many as a device computes at full speed.
BATCHED_TOKENS = {"cuda": 8192, "cpu": 1024}


def policy_of(options: PagedOptions, device: torch.device) -> Policy:
    """Return the rung's policy, with what a suite set; raises ValueError for what cannot be."""
    rung = RUNGS[options.rung]
    if device.type not in SHARES:
        raise ValueError(f"{KIND} runs on {' and '.join(SHARES)}, not on {device.type}")
    rows = options.max_num_seqs or rung.max_num_seqs
    tokens = options.max_num_batched_tokens or max(rows, BATCHED_TOKENS[device.type])
    if tokens < rows:
        raise ValueError(
            f"{KIND}: argument max_num_batched_tokens must be at least max_num_seqs, {rows}: each "
            f"that decodes is one token of a pass, not {tokens}"
        )
    return Policy(rows, tokens, rung.chunk and min(rung.chunk, tokens), rung.mixed)


def num_blocks_of(
    options: PagedOptions, policy: Policy, shape: Shape, block_size: int, device: torch.device,
    element_bytes: int,
) -> int:  # fmt: skip
    """Return how many blocks the cache gets: as many as were given, or as fit; no more than used.

    Prefix caching uses all that fits. Raises ValueError where `cache_gib`, or what is free, does
    not hold one sequence of the longest kind.
    """
    longest, num_blocks = longest_of(options, shape), options.num_blocks
    per_sequence = -(-longest // block_size)
    if num_blocks is None:
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element_bytes
        given = options.cache_gib
        num_bytes = free_bytes(device) * SHARES[device.type] if given is None else given * GIB
        num_blocks = int(num_bytes / (token_bytes * block_size))
        if num_blocks < per_sequence:
            raise ValueError(
                f"{KIND}: a cache of {num_bytes / GIB:.2f} GiB holds {num_blocks * block_size} "
                f"tokens, and one sequence may have {longest}: give cache_gib more, or "
                "max_model_len less"
            )
    if options.prefix_caching:
        return num_blocks
    return min(num_blocks, policy.max_num_seqs * per_sequence)


def longest_of(options: PagedOptions, shape: Shape) -> int:
    """Return how many tokens a sequence may have, prompt and output."""
    longest = options.max_model_len or shape.context_length
    if longest > shape.context_length:
        raise ValueError(
            f"{KIND}: argument max_model_len is {longest}, the model's context "
            f"{shape.context_length}"
        )
    return longest


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device, or of the machine."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text("ascii").splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo} does not say MemAvailable: give cache_gib or num_blocks")


def zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of a CPU, on pages of 2 MiB where the system has them.

    They take memory when they are first written. A decode step reads every weight once: with small
    pages a good part of it is address lookups.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(sizes, dtype=dtype)
    num_bytes = math.prod(sizes) * dtype.itemsize
    # Private: what is shared is on large pages only where the system was told so apart.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags)
    with contextlib.suppress(OSError):  # refused, it is as it was
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE
    return whole[skip : skip + num_bytes].view(dtype).view(sizes)
