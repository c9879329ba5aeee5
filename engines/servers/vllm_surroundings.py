"""What every process of vLLM finds around it: its environment variables, as its vendor wants them.

On a CPU vLLM asks for two libraries to be loaded before all others (an allocator, Intel's OpenMP),
for the cores that its threads are bound to, and for the size of its KV cache. A suite's own `env`
comes last. Standard library only: this runs in the instrument's process.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Mapping
from pathlib import Path

from headway.engines.launcher import LaunchSpec

GIB_BYTES = 1 << 30
# Without a size, the cache is taken out of all of the machine's memory.
CACHE_SHARE = 0.25
MOST_CACHE_GIB = 64
SIZES = frozenset(("kv_cache_memory_bytes", "gpu_memory_utilization"))
THREADS = "threads"  # of `args`: vLLM itself has no such argument


def surroundings(spec: LaunchSpec, arguments: Mapping[str, object]) -> Mapping[str, str]:
    """Return the environment variables of an engine with these arguments."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",  # `-m` would find a folder `vllm` where we are first
        # Said after vLLM's end, it would be the last line of the log, which is to say why.
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if spec.device == "cpu":
        if SIZES.isdisjoint(arguments):  # it would win over them
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(_cache_gib())
        variables["VLLM_CPU_OMP_THREADS_BIND"] = _cores(spec, arguments.get(THREADS))
        preloaded = ":".join(_libraries(spec))
        if preloaded and spec.image is None:  # an image knows its own libraries
            variables["LD_PRELOAD"] = preloaded
    return variables


def _cache_gib() -> int:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(MOST_CACHE_GIB, int(memory_bytes * CACHE_SHARE / GIB_BYTES)))


def _cores(spec: LaunchSpec, threads: object) -> str:
    """Return all cores that it may use, or the first `threads` of them."""
    cores = spec.cpus or sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[:threads] if isinstance(threads, int) else cores))


def _libraries(spec: LaunchSpec) -> list[str]:
    """Return what is to be loaded first, of what there is: neither is required."""
    allocator = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    openmp = Path(spec.executable).parent.parent / "lib" / "libiomp5.so"
    return [one for one in (allocator, str(openmp) if openmp.is_file() else None) if one]
