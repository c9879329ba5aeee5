"""What a running vLLM says of itself, in the words that reports use for all engines.

Its configuration as JSON values comes from /server_info, or from the engine object itself: either
way after vLLM has filled in every default. Standard library only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# vllm.config.CompilationMode
COMPILATION = ("none", "stock_torch_compile", "dynamo_trace_once", "vllm_compile")
PRELOADED = ("libtcmalloc", "libiomp5")


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the precision of weights and activations: `bfloat16`."""
    return str(config["model_config"]["dtype"]).removeprefix("torch.")


def device_of(config: Mapping[str, Any]) -> str:
    """Return `cpu` or `cuda`."""
    device = config["device_config"]
    return str(device.get("device_type") or device.get("device")).partition(":")[0]


def settings_of(
    config: Mapping[str, Any], environ: Mapping[str, Any], pids: Iterable[int]
) -> dict[str, object]:
    """Return the settings of a VllmConfig, of vLLM's own view of its environment variables, and of
    its processes."""
    model, cache = config["model_config"], config["cache_config"]
    scheduler, parallel = config["scheduler_config"], config["parallel_config"]
    speculative = config.get("speculative_config") or {}
    settings: dict[str, object] = {
        "max_num_seqs": scheduler["max_num_seqs"],
        "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
        "max_model_len": model["max_model_len"],
        "prefix_caching": cache["enable_prefix_caching"],
        "chunked_prefill": scheduler.get("enable_chunked_prefill"),
        "async_scheduling": scheduler.get("async_scheduling"),
        "block_size": cache["block_size"],
        "num_blocks": cache["num_gpu_blocks"],
        "kv_cache_dtype": cache["cache_dtype"],
        "enforce_eager": model["enforce_eager"],
        "compilation": _compilation(config.get("compilation_config") or {}),
        "attention_backend": (config.get("attention_config") or {}).get("backend") or "auto",
        "tensor_parallel_size": parallel["tensor_parallel_size"],
        "quantization": model.get("quantization"),
        "speculative": speculative.get("method"),
        "seed": model.get("seed"),
    }
    if device_of(config) == "cpu":
        cores = str(environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"))
        settings |= {
            "threads": count_cores(cores),
            "cores": cores,
            "kv_cache_gib": environ.get("VLLM_CPU_KVCACHE_SPACE"),
            "preloaded": preloaded(pids),
        }
    return settings


def count_cores(cores: str) -> int | None:
    """Return how many cores `0-3,8` names; None for what vLLM chooses itself (`auto`)."""
    if not re.fullmatch(r"[\d,-]+", cores):
        return None
    ranges = (re.findall(r"\d+", part) for part in cores.split(","))
    return sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges if ends)


def preloaded(pids: Iterable[int]) -> str:
    """Return which libraries that decide a CPU's speed any of these processes has mapped."""
    maps = ""
    for pid in pids:
        with contextlib.suppress(OSError):
            maps += Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return " ".join(name for name in PRELOADED if f"/{name}" in maps)


def _compilation(config: Mapping[str, Any]) -> str | None:
    mode = config.get("mode")
    if not isinstance(mode, int) or not 0 <= mode < len(COMPILATION):
        return None if mode is None else str(mode)
    return COMPILATION[mode] + (f" {config.get('backend') or ''}".rstrip() if mode else "")
