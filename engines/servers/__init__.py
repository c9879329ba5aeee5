"""Servers of others, one module a kind: how each is started, read back, and what it understands."""

from __future__ import annotations

from collections.abc import Mapping

from headway.engines.launcher import Launcher
from headway.engines.servers.hosted import HOST
from headway.engines.servers.llama_cpp import LLAMA_CPP

# Kinds that have a launcher of their own; every other kind is an engine that our host serves.
LAUNCHERS: Mapping[str, Launcher] = {
    "llama_cpp": LLAMA_CPP,
}


def launcher_of(kind: str) -> Launcher:
    """Return how engines of a kind are started."""
    return LAUNCHERS.get(kind, HOST)
