"""llama.cpp's own server, `llama-server`: continuous batching over a fixed number of slots.

Its OpenAI endpoint gives no token ids, so completions go to its native one, /completion. What it
says of itself over HTTP leaves out most of how it runs, which is read from what it logs instead.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core import EngineInfo
from headway.engines.launcher import Launcher, LaunchError, LaunchSpec, flags
from headway.engines.servers.dialects import LLAMA_CPP as DIALECT

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

PROGRAM = "llama-server"
DTYPES = {"all F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# How many slots it makes where only their length is said: as many as it would itself.
SLOTS = 4
# Of its log, what it was started with in the end: our name for it, and where it stands.
LOGGED = {
    "max_num_batched_tokens": r"\bn_batch\s*= (\d+)",
    "physical_batch": r"\bn_ubatch\s*= (\d+)",
    "threads": r"\bn_threads = (\d+)",
    "flash_attention": r"\b(?:flash_attn\s*=|Flash Attention) (auto|enabled|disabled)",
    "kv_cache_type": r"\bK \((\w+)\):",
    "kv_unified": r"\bkv_unified\s*= (\w+)",
}
OFFLOADED = r"offloaded (\d+)/\d+ layers to GPU"


def prepare(spec: LaunchSpec) -> list[str] | None:
    """Have the model written as GGUF, unless the suite names a file of the user's own."""
    if spec.args.get("gguf") is not None:
        return None
    model = json.dumps(dict(spec.model))
    return ["headway.engines.models.to_gguf", "--model-json", model, "--dtype", spec.dtype]


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command of the server that was compiled into its environment.

    `program` names another one, `gguf` another file. Its context is divided among its slots, so
    that `max_model_len` is what each gets; where neither that nor `parallel` is said it does as it
    likes. The prefix cache is off unless asked for: it has no salt, and cannot be emptied.
    """
    arguments = LLAMA_CPP.arguments(spec)
    if spec.cpus:  # it counts the machine's cores, and its threads spin
        arguments.setdefault("threads", len(spec.cpus))
    program = arguments.pop("program", None) or Path(spec.executable).parent / PROGRAM
    file = arguments.pop("gguf", None) or spec.made
    if file is None or not Path(file).is_file():
        message = f"{spec.instance} has no GGUF file to run: {file or 'none was made'}"
        raise LaunchError("no_weights", message)
    ours: dict[str, Any] = {"model": file, "alias": spec.served_name}
    ours |= {"host": "127.0.0.1", "port": port, "metrics": True, "slots": True, "ui": False}
    ours |= {"offline": True, "verbosity": 4} | _context(spec, arguments)
    if not arguments.setdefault("cache_prompt", False):
        ours["cache_ram"] = 0
    if spec.dtype == "float32":
        ours |= {"cache_type_k": "f32", "cache_type_v": "f32"}
    return [str(program), *flags(ours | arguments)]


def _context(spec: LaunchSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    slots, length = arguments.pop("parallel", None), arguments.pop("max_model_len", None)
    if slots is None and length is None:
        return {}
    slots = slots or SLOTS
    size = slots * (length or int(spec.model["context_length"]))
    return {"parallel": slots, "ctx_size": size, "kv_unified": False}


def info(endpoint: Endpoint) -> EngineInfo:
    """Read back who answers: what it says, what it logged, and what two small requests show."""
    spec, props = endpoint.spec, endpoint.get_json("/props")
    (listed,) = endpoint.get_json("/v1/models")["data"]
    log = spec.log.read_text(encoding="utf-8", errors="replace")
    settings: dict[str, Any] = {
        "max_num_seqs": props["total_slots"],
        "max_model_len": props["default_generation_settings"]["n_ctx"],
        "file_type": props["model_ftype"],
    }
    for name, pattern in LOGGED.items():
        if found := re.findall(pattern, log):
            settings[name] = int(found[-1]) if found[-1].isdecimal() else found[-1]
    once, again = _twice(endpoint)
    settings["prefix_caching"] = again["timings"]["cache_n"] > 0
    biased = once["generation_settings"]["logit_bias"]
    # Weights of a file of the user's own are judged by the dtype that the suite gives them.
    dtype = spec.dtype if "gguf" in spec.args else DTYPES.get(props["model_ftype"])
    layers = [int(number) for number in re.findall(OFFLOADED, log)[-1:]]
    return EngineInfo(
        kind=spec.kind,
        # The commit: the number before it counts the commits of whatever its folder lay in.
        version=str(props["build_info"]).rpartition("-")[2],
        model=str(listed["id"]),
        dtype=dtype or str(props["model_ftype"]),
        device="cuda" if any(layers) else "cpu",
        settings=settings,
        banned_ids=tuple(sorted(entry["token"] for entry in biased)),
    )


def _twice(endpoint: Endpoint) -> tuple[Any, Any]:
    """Ask for one token that ends nothing, twice: what is banned then, and is a prompt cached?"""
    special = set(endpoint.spec.model["special_ids"])
    ids = [id for id in range(len(special) + 16) if id not in special][:16]
    body = {"prompt": ids, "n_predict": 1, "ignore_eos": True, **DIALECT.fields}
    return endpoint.post(DIALECT.completions, body), endpoint.post(DIALECT.completions, body)


LLAMA_CPP = Launcher(
    command,
    info,
    DIALECT,
    prepare=prepare,
    equal={
        "max_num_seqs": "parallel",
        "max_num_batched_tokens": "batch_size",
        "max_model_len": "max_model_len",
        "prefix_caching": "cache_prompt",
        "threads": "threads",
    },
)
