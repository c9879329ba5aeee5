"""Faults by plan: which requests go wrong, and how. Checked whole before anything is served."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.mock_server.asked import Asked
from headway.tables import Reader

# Kind → the keys that it takes beside `kind`, `requests` and `every`.
KINDS: Mapping[str, tuple[str, ...]] = {
    "http_error": ("status", "body"),
    "refuse_ignore_eos": ("body",),
    "no_answer": (),
    "error_event": ("after_tokens", "message"),
    "reset": ("after_tokens",),
    "close": ("after_tokens",),
    "bad_chunk": ("after_tokens",),
    "stall": ("after_tokens", "for_s"),
    "comment": ("after_tokens",),
    "no_done": (),
}
OF_STREAMS = ("comment", "no_done")
# Those that are told instead of an answer.
STATUS = {"http_error": 500, "refuse_ignore_eos": 400}
MESSAGE = "planned by the mock server"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and for whom: listed requests, every n-th one, or (neither) all.

    `after_tokens` is how many tokens are written before, rounded down to whole writes; it happens
    when the next one is due. None is before the answer's first byte (only `reset` and `close`).
    `for_s` is None for a stall without an end, `status` where there is no HTTP error, `body` where
    that has OpenAI's.
    """

    kind: str
    requests: tuple[int, ...] | None = None
    every: int | None = None
    after_tokens: int | None = None
    for_s: float | None = None
    status: int | None = None
    body: str | None = None
    message: str = MESSAGE

    def selects(self, number: int, asked: Asked) -> bool:
        """Say whether it happens to this request, the first of which is number 1."""
        if self.requests is not None and number not in self.requests:
            return False
        if self.every is not None and number % self.every:
            return False
        if self.kind == "refuse_ignore_eos" and not asked.ignore_eos:
            return False
        if not asked.stream:
            return self.kind not in OF_STREAMS
        return self.after_tokens is None or self.after_tokens < asked.max_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults in order; a request gets the first that selects it."""

    faults: tuple[Fault, ...] = ()

    def find(self, number: int, asked: Asked) -> Fault | None:
        """Return what happens to a request."""
        return next((fault for fault in self.faults if fault.selects(number, asked)), None)


def load(path: Path) -> Plan:
    """Read a plan, TOML or (by its suffix) JSON; raises SuiteError with one sentence."""
    reader = Reader(str(path))
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise reader.fail("the file", f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        what = "JSON" if path.suffix == ".json" else "TOML"
        raise reader.fail("the file", f"is not {what}: {error}") from error
    if not isinstance(table, dict):
        raise reader.fail("the file", "must hold an object with a list `fault`")
    reader.known("", table, ["fault"])
    faults = [
        _fault(reader, f"fault[{i}]", t) for i, t in enumerate(reader.tables(table, "fault"), 1)
    ]
    if not faults:
        raise reader.fail("fault", "is empty; a plan names one or more")
    return Plan(tuple(faults))


def _fault(reader: Reader, where: str, table: Mapping[str, Any]) -> Fault:
    kind = reader.choice(f"{where}.kind", reader.get(where, table, "kind", str, ""), tuple(KINDS))
    reader.known(where, table, ("kind", "requests", "every", *KINDS[kind]))
    requests = reader.get(where, table, "requests", list, None)
    if requests is not None:
        if not requests or not all(type(n) is int and n >= 1 for n in requests):
            raise reader.fail(
                f"{where}.requests", f"is {requests!r}; it must be a list of numbers from 1"
            )
        if "every" in table:
            raise reader.fail(f"{where}.every", "cannot stand beside requests: take one of them")
    after = reader.get(where, table, "after_tokens", int, None if kind in ("reset", "close") else 0)
    if after is not None and after < 0:
        raise reader.fail(f"{where}.after_tokens", f"is {after!r}; it must be 0 or more")
    status = reader.get(where, table, "status", int, STATUS.get(kind))
    if status is not None and not 400 <= status <= 599:
        raise reader.fail(f"{where}.status", f"is {status!r}; it must be from 400 to 599")
    return Fault(
        kind=kind,
        requests=None if requests is None else tuple(requests),
        every=reader.positive(where, table, "every", int, None),
        after_tokens=after if "after_tokens" in KINDS[kind] else None,
        for_s=reader.positive(where, table, "for_s", float, None),
        status=status,
        body=reader.get(where, table, "body", str, None),
        message=reader.get(where, table, "message", str, MESSAGE),
    )
