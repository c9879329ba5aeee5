"""What the two processes say to each other: a JSON object a line, over a socket pair.

To the engine: add, abort, step, stats, replay, stop (the replay). From it: ready, out, refused (a
step it can't time), seconds, stats, replayed. Everything that leaves in one step of the engine is
one line.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from headway.core import EngineInfo
from headway.engines.contract import Departure, Output, Submission
from headway.engines.host.inside import Schedule

Message = dict[str, Any]


class Lines:
    """Cuts bytes that come in any pieces into messages."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes."""
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._rest = []
        self._rest.append(rest)
        return map(json.loads, whole)


class Receiver(asyncio.Protocol):
    """Passes messages on as they come; `lost` is called when the other process is gone."""

    def __init__(
        self, take: Callable[[Message], None], lost: Callable[[], None] | None = None
    ) -> None:
        self._take = take
        self._lost = lost
        self._lines = Lines()

    def data_received(self, data: bytes) -> None:
        """Pass on what `data` completes."""
        for message in self._lines.feed(data):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so."""
        if self._lost is not None:
            self._lost()


def to_line(message: Mapping[str, object]) -> bytes:
    """Return a message as it goes over the socket."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def add_message(submission: Submission) -> Mapping[str, object]:
    """Ask the engine for a request."""
    return {"add": asdict(submission)}


def read_submission(fields: Message) -> Submission:
    """Return what `add_message` asked."""
    return Submission(**{**fields, "prompt_token_ids": tuple(fields["prompt_token_ids"])})


def replay_message(schedule: Schedule) -> Mapping[str, object]:
    """Ask the engine to serve a schedule by itself."""
    return {"replay": asdict(schedule)}


def read_schedule(fields: Message) -> Schedule:
    """Return what `replay_message` asked."""
    submissions = tuple(map(read_submission, fields["submissions"]))
    return Schedule(submissions, tuple(fields["slots_s"]))


def ready_message(info: EngineInfo) -> Mapping[str, object]:
    """Say that the engine can serve, what it is, and in which Python."""
    versions = {"python": platform.python_version(), **info.versions}
    return {"ready": asdict(replace(info, versions=versions))}


def read_info(fields: Message) -> EngineInfo:
    """Return what `ready_message` said."""
    return EngineInfo(**{**fields, "banned_ids": tuple(fields.get("banned_ids", ()))})


def out_message(
    at_s: float, outputs: Sequence[Output], arrived_s: Mapping[int, float]
) -> Mapping[str, object]:
    """Pass on what left in one step, all with one stamp."""
    rows = [
        (o.id, o.token_ids, o.finish_reason, o.error, o.counted, o.cached, arrived_s[o.id])
        for o in outputs
    ]
    return {"out": rows, "at_s": at_s}


def read_departures(message: Message) -> Iterator[Departure]:
    """Yield what `out_message` passed on."""
    at_s = message["at_s"]
    for id, token_ids, finish_reason, error, counted, cached, arrived_s in message["out"]:
        output = Output(id, tuple(token_ids), finish_reason, error, counted, cached)
        yield Departure(output, at_s, arrived_s)
