"""Kind `http`: a server that runs already, at the suite's `base_url`.

What it understands is said by `args.dialect`, `openai` (what all have in common) unless told. It is
ready when it lists its models; where it lists none, the first request decides. Its processes are
not ours: launch time and memory are nobody's to measure here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.core import EngineInfo
from headway.engines.launcher import Launcher, LaunchError, LaunchSpec
from headway.engines.servers.dialects import DIALECTS
from headway.engines.servers.sglang import SGLANG

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

DEFAULT = "openai"
# Where servers say which version they are, and under which key.
VERSIONS = (("/version", "version"), ("/info", "version"), ("/props", "build_info"))


def info(endpoint: Endpoint) -> EngineInfo:
    """Ask whatever its dialect has to be asked; what nobody says is not made up."""
    if endpoint.spec.args.get("dialect") == "sglang":
        with contextlib.suppress(LaunchError, OSError):
            found, ours = SGLANG.info(endpoint), endpoint.ours
            dtype = None if found.dtype == "auto" else found.dtype
            device = found.device if ours else None  # of another machine, perhaps
            return replace(found, kind=endpoint.spec.kind, dtype=dtype, device=device)
    version = ""
    for path, key in VERSIONS:
        with contextlib.suppress(LaunchError, OSError):
            said = endpoint.get_json(path)
            version = version or (str(said.get(key, "")) if isinstance(said, dict) else "")
    return EngineInfo(endpoint.spec.kind, version, endpoint.served_name, None, None)


def served(spec: LaunchSpec) -> str | None:
    """Return the name that the suite says it goes by there."""
    name = spec.args.get("served_model")
    return None if name is None else str(name)


def http(args: Mapping[str, Any]) -> Launcher:
    """Return how a running server is looked at; raises KeyError for a dialect there is not."""
    dialect = str(args.get("dialect", DEFAULT))
    return Launcher(
        None,
        info,
        DIALECTS[dialect],
        health="/v1/models",
        served=served,
        environment="none",
    )
