"""A load worker: `python -m headway.loadgen.worker`, which `headway.loadgen.workers` starts."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from typing import Any

from headway.loadgen.share import Share, measure
from headway.loadgen.workers import SIZE, framed
from headway.transport import run

PROGRESS_PERIOD_S = 0.2


def _read() -> Any:
    """Return the next value from the parent; ends this process when the parent is gone."""
    head = sys.stdin.buffer.read(SIZE.size)
    if len(head) < SIZE.size:
        os._exit(1)
    return pickle.loads(sys.stdin.buffer.read(SIZE.unpack(head)[0]))


def _end_with_the_parent() -> None:
    """Wait for the end of what the parent says, which is its own: it says nothing more."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _say(kind: str, value: object = None) -> None:
    sys.stdout.buffer.write(framed((kind, value)))
    sys.stdout.buffer.flush()


async def _work(share: Share) -> None:
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more

    async def tell_progress() -> None:
        nonlocal done
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            if done:
                _say("progress", done)
                done = 0

    async def begin() -> float:
        _say("ready")
        start_s: float = await asyncio.to_thread(_read)
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        return start_s

    telling = asyncio.create_task(tell_progress())
    try:
        measured = await measure(share, count, begin)
    finally:
        telling.cancel()
    _say("progress", done)
    _say("done", measured)


if __name__ == "__main__":
    run(_work(_read()))
