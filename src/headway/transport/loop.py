"""The event loop that carries the sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: a turn of it costs a third of asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)
