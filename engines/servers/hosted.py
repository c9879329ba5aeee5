"""Engines that our own host serves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headway.core import Capabilities, EngineInfo
from headway.engines.launcher import Launcher, LaunchSpec

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command of our own host, in the engine's environment."""
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
        *("--args", json.dumps(HOST.arguments(spec))),
    ]


def info(endpoint: Endpoint) -> EngineInfo:
    """Ask the host, which asked the engine."""
    fields = endpoint.get_json("/headway/info")
    # Another commit's host does not say it.
    return EngineInfo(**{**fields, "banned_ids": tuple(fields.get("banned_ids", ()))})


HOST = Launcher(
    command,
    info,
    Capabilities(
        strict_fields=True,
        engine_stamps=True,
        control=True,
        fields={"return_token_ids": True},
    ),
    equal={"max_num_seqs": "max_batch"},
)
