"""SGLang's own server, as of 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core import EngineInfo
from headway.engines.launcher import Launcher, LaunchSpec, flags, weights
from headway.engines.servers.dialects import SGLANG as DIALECT

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

# Of what it resolved, what a reader of its numbers may want to know.
KEPT = (
    *("attention_backend", "sampling_backend", "max_prefill_tokens", "max_total_num_tokens"),
    *("mem_fraction_static", "schedule_policy", "stream_interval", "tp_size"),
)


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command; what a request leaves open is OpenAI's default, and not the model's."""
    ours = {
        "model_path": weights(spec),
        "served_model_name": spec.served_name,
        "host": spec.host,
        "port": port,
        "dtype": spec.dtype,
        "device": spec.device.partition(":")[0],
        "random_seed": 0,
        "sampling_defaults": "openai",
        "enable_cache_report": True,
        "enable_metrics": True,
    }
    words = flags({**ours, **SGLANG.arguments(spec)}, no="")
    return [spec.executable, "-m", "sglang.launch_server", *words]


def env(spec: LaunchSpec) -> Mapping[str, str]:
    """Return what keeps its /health from generating a token itself, a second long, each time.

    It still answers 503 until its own warm-up has come back; the first request is ours.
    """
    return {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


def info(endpoint: Endpoint) -> EngineInfo:
    """Ask for the arguments as it resolved them, and for what its scheduler made of them."""
    said = endpoint.get_json("/server_info")
    resolved = {
        "max_num_seqs": said.get("max_running_requests"),
        "max_num_batched_tokens": said.get("chunked_prefill_size"),
        "max_model_len": said.get("context_length") or said.get("max_req_input_len"),
        "prefix_caching": not said.get("disable_radix_cache", False),
    }
    settings = resolved | {name: said.get(name) for name in KEPT}
    return EngineInfo(
        kind="sglang",
        version=str(said.get("version", "")),
        model=str(said.get("served_model_name", "")),
        dtype=said.get("dtype"),
        device=said.get("device"),
        settings={name: value for name, value in settings.items() if value is not None},
    )


SGLANG = Launcher(
    command,
    info,
    replace(DIALECT, cached_tokens=True),
    env,
    reset="/flush_cache",
    equal={
        "max_num_seqs": "max_running_requests",
        "max_num_batched_tokens": "chunked_prefill_size",
        "max_model_len": "context_length",
        "prefix_caching": "not disable_radix_cache",
    },
    environment="given",
    image=True,
)
