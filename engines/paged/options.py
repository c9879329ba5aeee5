"""The rungs of the ladder: one engine, and the ideas that make it fast as settings of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIND = "paged"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Rung:
    """What the engine does.

    contiguous: each sequence holds one block as long as the longest sequence may get.
    recompute: nothing is cached between steps; each passes the whole sequence again.
    chunk: how many prompt tokens a pass takes at most; None: whole prompts.
    mixed: prompt parts and decodes share a pass, else they take turns.
    fused: Q, K and V are one matrix, and so are gate and up.
    graphs: a decode step is one recorded or compiled unit, as far as the device has one.
    """

    max_num_seqs: int = 32
    contiguous: bool = False
    recompute: bool = False
    chunk: int | None = None
    mixed: bool = False
    attention: str = "sdpa"
    kernels: str = "torch"
    fused: bool = False
    graphs: bool = False


RUNGS: Mapping[str, Rung] = {
    "no_cache": Rung(max_num_seqs=1, contiguous=True, recompute=True),
    "kv_cache": Rung(max_num_seqs=1, contiguous=True),
    "continuous": Rung(contiguous=True),
    "paged": Rung(),
    "chunked": Rung(chunk=512),
    "fused32": Rung(chunk=512, mixed=True),
    "flash32": Rung(chunk=512, mixed=True, attention="auto"),
    "graphs": Rung(
        max_num_seqs=512,
        chunk=512,
        mixed=True,
        attention="auto",
        kernels="auto",
        fused=True,
        graphs=True,
    ),
}


@dataclass(frozen=True, slots=True)
class PagedOptions:
    """Arguments; None is what the rung or the machine gives.

    `cache_gib` or `num_blocks` size the cache, else a share of the memory that is free. `attention`
    is auto, plain, sdpa, native or triton; `kernels` auto, torch or native.
    `overlap` prepares a step while the one before it computes. `profile` times the parts of steps,
    which costs speed. `compile` compiles decode steps of `graphs` where plain torch runs them on a
    CPU, which takes a minute at launch.
    """

    rung: str = "graphs"
    threads: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    cache_gib: float | None = None
    attention: str | None = None
    kernels: str | None = None
    prefix_caching: bool = False
    overlap: bool | None = None
    compile: bool = True
    profile: bool = False

    def __post_init__(self) -> None:
        if self.rung not in RUNGS:
            raise ValueError(f"{KIND}: argument rung must be one of {', '.join(RUNGS)}")
        counts = ("threads", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        for name in (*counts, "block_size", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{KIND}: argument {name} must be at least 1, not {value}")
        if self.cache_gib is not None and not 0 < self.cache_gib < float("inf"):
            raise ValueError(f"{KIND}: argument cache_gib must be above 0, not {self.cache_gib}")
        if self.cache_gib is not None and self.num_blocks is not None:
            raise ValueError(f"{KIND}: give cache_gib or num_blocks, not both")
        if self.kernels not in (None, "auto", "torch", "native"):
            raise ValueError(f"{KIND}: argument kernels must be auto, torch or native")
        if self.overlap and RUNGS[self.rung].recompute:
            raise ValueError(f"{KIND}: rung {self.rung} reads each token back before the next step")
        if self.prefix_caching and (RUNGS[self.rung].contiguous or RUNGS[self.rung].recompute):
            raise ValueError(f"{KIND}: rung {self.rung} shares no blocks: it has no prefix caching")
