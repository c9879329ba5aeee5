"""TensorRT-LLM's own server, `trtllm-serve`, as of 1.2.

Its completions have no salt and it empties no cache on demand, so blocks are not reused unless a
suite says so. With its PyTorch backend, the default, nothing is built before it loads. A folder
that holds an engine built before is given as `args.engine_dir`; with `backend = "tensorrt"` alone
it builds one as it starts, and says in its log how long that took.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core import EngineInfo
from headway.engines.launcher import Launcher, LaunchSpec, flags, weights
from headway.engines.servers.dialects import TENSORRT_LLM as DIALECT

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

OURS = ("config", "engine_dir", "prefix_caching")  # arguments that are none of its flags
_BUILT = re.compile(r"Total time of building .*: (\d+):(\d\d):(\d\d)$", re.M)


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command; it calls its model by the last name of the folder it is in."""
    given = TENSORRT_LLM.arguments(spec)
    model, engine = weights(spec), given.get("engine_dir")
    ours: dict[str, Any] = {"host": spec.host, "port": port}
    ours["extra_llm_api_options"] = str(spec.config)
    if engine is not None:
        ours |= {"backend": "tensorrt", "tokenizer": model}
    own = {name: value for name, value in given.items() if name not in OURS}
    words = flags({**ours, **own}, no="", dash="_")
    return [_program(spec), str(engine or model), *words]


def _program(spec: LaunchSpec) -> str:
    """Return the script that lies beside its Python, or is on the PATH."""
    python = Path(spec.executable)
    return str(python.with_name("trtllm-serve")) if python.is_absolute() else "trtllm-serve"


def config(spec: LaunchSpec) -> str:
    """Return what it knows as a file only; JSON is YAML. `args.config` overrides it by key."""
    given = TENSORRT_LLM.arguments(spec)
    reuse = bool(given.get("prefix_caching", False))
    wanted: dict[str, Any] = {
        "dtype": spec.dtype,
        "kv_cache_config": {"enable_block_reuse": reuse},
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
    }
    if given.get("engine_dir") is not None:  # the engine's own dtype, and no PyTorch to ask
        wanted = {"kv_cache_config": wanted["kv_cache_config"]}
    for name, value in given.get("config", {}).items():
        nested = isinstance(value, dict) and isinstance(wanted.get(name), dict)
        wanted[name] = wanted[name] | value if nested else value
    return json.dumps(wanted)


def info(endpoint: Endpoint) -> EngineInfo:
    """Ask for its version: it tells no setting. What it built at its start is in its log."""
    said = endpoint.get_json("/version")
    built = _BUILT.findall(endpoint.spec.log.read_text(encoding="utf-8", errors="replace"))
    hours, minutes, seconds = map(int, built[-1]) if built else (0, 0, 0)
    spent = {"engine_build_s": hours * 3600 + minutes * 60 + seconds} if built else {}
    return EngineInfo(
        kind="tensorrt_llm",
        version=str(said.get("version", "")),
        model=endpoint.served_name,
        dtype=None,
        device=None,
        settings=spent,
    )


TENSORRT_LLM = Launcher(
    command,
    info,
    DIALECT,
    metrics="/prometheus/metrics",
    equal={
        "max_num_seqs": "max_batch_size",
        "max_num_batched_tokens": "max_num_tokens",
        "max_model_len": "max_seq_len",
        "prefix_caching": "prefix_caching",
    },
    served=lambda spec: None,
    config=config,
    environment="given",
    image=True,
    container=("--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
)
