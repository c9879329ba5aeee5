"""The log of a mock server, and what it says of each request. Pure, but for the file it reads.

All times are CLOCK_MONOTONIC of the machine, so a client on it may compare them with its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway import codec

Ended = Literal["done", "fault", "refused", "client_gone", "stopped"]


class TruthError(ValueError):
    """A log that cannot be read, in one sentence."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request as the server saw it.

    `number` counts requests for completions from 1, `connection` the connections from 1; every
    request of a connection has the same `accepted_s`, when accept returned. `arrived_s` is the
    kernel's stamp of the segment that completed the request (None: no stamp, as with TLS),
    `parsed_s` when its body was read and checked: due times count from there.

    `due_s`, `writes_s` and `tokens` have one entry a write of tokens. A write is stamped just
    before the `send` that took its last byte: on loopback a client may have read it before `send`
    returns, so only this stamp can never be later than the client's. `blocked_bytes` could not be
    sent at once, as the socket was full.

    `fault` is the kind planned for this request. `ended`: "done" all was written; "fault" cut off
    by plan; "refused" answered with an error of the server's own; "client_gone"; "stopped" with
    the server.
    """

    number: int
    connection: int
    endpoint: Literal["completions", "chat"]
    stream: bool | None
    prompt_tokens: int | None
    max_tokens: int | None
    accepted_s: float
    arrived_s: float | None
    parsed_s: float
    due_s: tuple[float, ...]
    writes_s: tuple[float, ...]
    tokens: tuple[int, ...]
    fault: str | None
    ended: Ended
    ended_s: float
    blocked_bytes: int


def load(path: Path | str) -> tuple[Record, ...]:
    """Read a log, in the order of the requests; raises TruthError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TruthError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(codec.decode(Record, json.loads(line), "record"))
        except ValueError as error:
            raise TruthError(f"{path}, line {number}: {error}") from error
    return tuple(records)


def ttft_s(record: Record) -> float | None:
    """Return first write − parsed; None where no token was written."""
    return record.writes_s[0] - record.parsed_s if record.writes_s else None


def itl_s(record: Record) -> tuple[float, ...]:
    """Return the gaps between writes of tokens."""
    return tuple(b - a for a, b in zip(record.writes_s, record.writes_s[1:], strict=False))


def late_s(record: Record) -> tuple[float, ...]:
    """Return how long after it was due each write was made."""
    return tuple(w - d for w, d in zip(record.writes_s, record.due_s, strict=True))


def peak_concurrency(records: Iterable[Record]) -> int:
    """Return the most requests between parsed and last write (if none: their end) at a time."""
    steps: list[tuple[float, int]] = []
    for record in records:
        last_s = record.writes_s[-1] if record.writes_s else record.ended_s
        steps += [(record.parsed_s, 1), (last_s, -1)]
    peak = now = 0
    for _, step in sorted(steps):  # of one moment, who leaves goes first
        now += step
        peak = max(peak, now)
    return peak
