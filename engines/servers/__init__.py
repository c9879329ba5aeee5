"""Servers of others, one module a kind: how each is started, read back, and what it understands."""

from __future__ import annotations

from collections.abc import Mapping

from headway.engines.launcher import Launcher
from headway.engines.servers.hosted import HOST
from headway.engines.servers.transformers_serve import SERVE

# Kinds that have a launcher of their own; every other kind is an engine that our host serves.
LAUNCHERS: Mapping[str, Launcher] = {"transformers_serve": SERVE}


def launcher_of(kind: str) -> Launcher:
    """Return how engines of a kind are started."""
    return LAUNCHERS.get(kind, HOST)
