"""One request while it is served, and its record afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

from headway.mock_server.connection import Connection
from headway.mock_server.dialects import COMMENT, Answer
from headway.mock_server.plan import Fault
from headway.mock_server.timing import Timing, dues
from headway.mock_server.truth import Ended, Record

JSON = "application/json"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CUT_OFF = ("error_event", "reset", "close", "bad_chunk")


def head_of(status: int, length: int, kind: str, keep_alive: bool) -> bytes:
    """Return the head of a response that is sent whole."""
    lines = [
        f"HTTP/1.1 {status} {reason_of(status)}",
        f"Content-Type: {kind}",
        f"Content-Length: {length}",
        *([] if keep_alive else ["Connection: close"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def reason_of(status: int) -> str:
    """Return the words for a status; a plan may hold one that has none."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Planned"


@dataclass(slots=True, eq=False)
class Stream:
    """What the loop needs of a request. Per token it holds eight bytes, the stamp of its write.

    `left` writes of tokens are to come; then the answer is complete or, with `cut_off`, its fault
    is due in place of the next write.
    `answer` is None for a request that was refused before anything was known of it.
    """

    number: int
    chat: bool
    connection: Connection
    keep_alive: bool
    arrived_s: float | None
    parsed_s: float
    answer: Answer | None = None
    fault: Fault | None = None
    left: int = 0
    cut_off: bool = False
    chunks: Iterator[bytes] = field(default_factory=lambda: iter(()))
    gaps: Iterator[float] = field(default_factory=lambda: iter(()))
    writes: array[float] = field(default_factory=lambda: array("d"))
    blocked_bytes: int = 0
    ended: Ended | None = None
    ended_s: float = 0.0

    def prepare(self, timing: Timing) -> None:
        """Make ready to write; needs `answer`, and `fault` if there is one."""
        assert self.answer is not None
        kind = None if self.fault is None else self.fault.kind
        self.cut_off = kind in CUT_OFF
        self.left = self.fault_at() if self.cut_off else self.answer.num_writes()
        self.gaps = self.gaps_of(timing)
        if not self.answer.asked.stream:
            self.chunks = self._whole()
            return
        self.chunks = self.answer.stream(done=kind != "no_done")
        if kind == "comment":
            at = self.fault_at()
            self.chunks = (
                COMMENT + c if k == at else c for k, c in enumerate(self.answer.stream())
            )

    def _whole(self) -> Iterator[bytes]:
        """Yield the one write of an answer that is not streamed, made when it is due."""
        assert self.answer is not None
        body = self.answer.whole()
        yield head_of(200, len(body), JSON, self.keep_alive) + body

    def gaps_of(self, timing: Timing) -> Iterator[float]:
        """Return the gaps between due times; an answer that is not streamed is due at its end."""
        assert self.answer is not None
        stall_at, stall_s = None, 0.0
        if self.fault is not None and self.fault.kind == "stall":
            stall_at = self.fault_at()
            stall_s = float("inf") if self.fault.for_s is None else self.fault.for_s
        if self.answer.asked.stream:
            return timing.gaps(self.number, stall_at, stall_s)
        size = self.answer.writer.tokens_per_chunk
        n = -(-self.answer.asked.max_tokens // size)
        (last_s,) = dues(0.0, timing.gaps(self.number), n)[-1:]
        return iter((last_s + stall_s,))

    def fault_at(self) -> int:
        """Return the write that the fault comes before, in whole writes."""
        assert self.answer is not None
        assert self.fault is not None
        after = (self.fault.after_tokens or 0) if self.answer.asked.stream else 0
        return after // self.answer.writer.tokens_per_chunk

    def end(self, ended: Ended, at_s: float) -> None:
        """Let go of all that only serving needs."""
        self.ended, self.ended_s = ended, at_s
        self.chunks, self.gaps = iter(()), iter(())

    def record(self, timing: Timing) -> Record:
        """Return what the log says of it, once it has ended."""
        assert self.ended is not None
        answer, n = self.answer, len(self.writes)
        return Record(
            number=self.number,
            connection=self.connection.number,
            endpoint="chat" if self.chat else "completions",
            stream=None if answer is None else answer.asked.stream,
            prompt_tokens=None if answer is None else answer.asked.prompt_tokens,
            max_tokens=None if answer is None else answer.asked.max_tokens,
            accepted_s=self.connection.accepted_s,
            arrived_s=self.arrived_s,
            parsed_s=self.parsed_s,
            due_s=() if answer is None else dues(self.parsed_s, self.gaps_of(timing), n),
            writes_s=tuple(self.writes),
            tokens=() if answer is None else tuple(map(answer.tokens, range(n))),
            fault=None if self.fault is None else self.fault.kind,
            ended=self.ended,
            ended_s=self.ended_s,
            blocked_bytes=self.blocked_bytes,
        )
