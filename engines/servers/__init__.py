"""Servers of others, one module a kind: how each is started, read back, and what it understands."""

from __future__ import annotations

from collections.abc import Mapping

from headway.engines.launcher import Launcher
from headway.engines.servers import vllm_hosted, vllm_serve
from headway.engines.servers.hosted import HOST

# Kinds that have a launcher of their own; every other kind is an engine that our host serves.
LAUNCHERS: Mapping[str, Launcher] = {
    "vllm_serve": vllm_serve.LAUNCHER,
    "vllm": vllm_hosted.LAUNCHER,
    "vllm_offline": vllm_hosted.LAUNCHER,
}


def launcher_of(kind: str) -> Launcher:
    """Return how engines of a kind are started."""
    return LAUNCHERS.get(kind, HOST)
