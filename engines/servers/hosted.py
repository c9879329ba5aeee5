"""Engines that our own host serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core import Capabilities, EngineInfo
from headway.engines.launcher import Launcher, LaunchSpec

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

CAN = Capabilities(
    strict_fields=True,
    hosted=True,
    steps=True,
    fields={"return_token_ids": True},
)


def hosted(
    can: Capabilities,
    equal: Mapping[str, str],
    env: Callable[[LaunchSpec], Mapping[str, str]] | None = None,
) -> Launcher:
    """Return how our host serves a kind: what it can, its names for settings, its environment."""

    def command(spec: LaunchSpec, port: int) -> list[str]:
        return [
            spec.executable,
            str(spec.boot),
            "headway.engines.host",
            spec.kind,
            *("--model-json", json.dumps(dict(spec.model))),
            *("--served-name", spec.served_name),
            *("--dtype", spec.dtype),
            *("--device", spec.device),
            *("--port", str(port)),
            *("--args", json.dumps(launcher.arguments(spec))),
        ]

    launcher = Launcher(command, info, can, env or (lambda spec: {}), equal=equal)
    return launcher


def info(endpoint: Endpoint) -> EngineInfo:
    """Ask the host, which asked the engine, or what of ours runs beside a server."""
    fields = endpoint.get_json("/headway/info")
    # Another commit's host does not say it.
    return EngineInfo(**{**fields, "banned_ids": tuple(fields.get("banned_ids", ()))})


HOST = hosted(CAN, {})
HF_NAIVE = hosted(CAN, {"threads": "threads"})
HF_STATIC = hosted(CAN, {"max_num_seqs": "max_batch", "threads": "threads"})
PAGED = hosted(
    replace(CAN, salt="cache_salt"),
    {
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "max_model_len": "max_model_len",
        "prefix_caching": "prefix_caching",
        "threads": "threads",
    },
)
# An engine of the user's own may have a prefix cache, which `Submission.salt` is for.
OWN = hosted(replace(CAN, salt="cache_salt"), {})
