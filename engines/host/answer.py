"""One accepted request's life in the front: departures in, bytes out, whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headway.engines.contract import Departure, Output, Submission
from headway.engines.host.chunks import (
    DONE,
    ChunkWriter,
    Shape,
    Stamps,
    Usage,
    error_event,
    whole_body,
)
from headway.engines.host.http import Reply
from headway.engines.host.openai import error_body
from headway.engines.host.text import Piece, Transcript


@dataclass(frozen=True, slots=True)
class Ended:
    """How an answer ended. `at_work` says that the engine does not know of it yet."""

    submission: Submission
    finish_reason: str
    num_tokens: int
    at_work: bool


class Response(Protocol):
    """How an answer is written."""

    def go_on(self, piece: Piece, stamps: Stamps) -> None:
        """Pass a piece on; more follows."""

    def end(self, piece: Piece, stamps: Stamps, usage: Usage) -> None:
        """Pass the last piece on."""

    def fail(self, message: str) -> None:
        """End with an error."""


class StreamResponse:
    """A server-sent event per departure; the usage event last when it was asked for.

    The head of the response leaves with the first tokens, so that a request that fails before
    them is answered with a status code; after them an error is the stream's last event.
    """

    def __init__(self, reply: Reply, shape: Shape, prompt: tuple[int, ...], usage: bool) -> None:
        self._reply = reply
        self._shape = shape
        self._writer = ChunkWriter(shape, prompt)
        self._include_usage = usage

    def go_on(self, piece: Piece, stamps: Stamps) -> None:
        """Write a chunk, unless all of the piece is held back: it leaves with what completes it."""
        if piece.text or (self._shape.with_token_ids and piece.token_ids):
            self._reply.write(*self._events(piece, stamps))

    def end(self, piece: Piece, stamps: Stamps, usage: Usage) -> None:
        """Write the last chunk, and what follows it."""
        events = self._events(piece, stamps)
        if self._include_usage:
            events.append(self._writer.usage(usage))
        self._reply.end(*events, DONE)

    def fail(self, message: str) -> None:
        """Write the error as the last event and close, or answer with a status code."""
        if self._reply.started:
            self._reply.end(error_event(error_body(500, message)), keep_alive=False)
        else:
            self._reply.refuse(500, message)

    def _events(self, piece: Piece, stamps: Stamps) -> list[bytes]:
        events = []
        if not self._reply.started:
            self._reply.start("text/event-stream")
            if self._shape.chat:
                events.append(self._writer.role())
        events.append(self._writer.piece(piece, stamps))
        return events


class WholeResponse:
    """One body at the end."""

    def __init__(self, reply: Reply, shape: Shape, prompt: tuple[int, ...]) -> None:
        self._reply = reply
        self._shape = shape
        self._prompt = prompt
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def go_on(self, piece: Piece, stamps: Stamps) -> None:
        """Keep the piece."""
        self._texts.append(piece.text)
        self._token_ids.extend(piece.token_ids)

    def end(self, piece: Piece, stamps: Stamps, usage: Usage) -> None:
        """Write the body."""
        self.go_on(piece, stamps)
        whole = Piece("".join(self._texts), tuple(self._token_ids), piece.finish_reason)
        self._reply.send(200, whole_body(self._shape, whole, usage, stamps, self._prompt))

    def fail(self, message: str) -> None:
        """Answer with a status code."""
        self._reply.refuse(500, message)


class Answer:
    """Takes one request's departures; `on_end` is called once, whatever ends it."""

    def __init__(
        self,
        submission: Submission,
        transcript: Transcript,
        response: Response,
        on_end: Callable[[Ended], None],
    ) -> None:
        self._submission = submission
        self._transcript = transcript
        self._response = response
        self._on_end = on_end
        self._over = False

    def deliver(self, departure: Departure) -> None:
        """Take one departure in and pass it on."""
        if self._over:
            return
        output = departure.output
        if output.finish_reason == "error":
            self._finish("error", at_work=False)
            self._response.fail(output.error or "the engine gave no reason")
            return
        piece = self._transcript.take(output.token_ids, output.finish_reason)
        stamps = Stamps(departure.arrived_s, departure.at_s)
        if piece.finish_reason is None:
            self._response.go_on(piece, stamps)
            return
        # A stop string ends the answer while the engine still works on it.
        self._finish(piece.finish_reason, at_work=output.finish_reason is None)
        self._response.end(piece, stamps, self._usage(output))

    def disconnected(self) -> None:
        """End: nobody reads any more."""
        if not self._over:
            self._finish("abort", at_work=True)

    def _finish(self, reason: str, at_work: bool) -> None:
        self._over = True
        self._on_end(Ended(self._submission, reason, self._transcript.num_tokens, at_work))

    def _usage(self, last: Output) -> Usage:
        num_tokens = self._transcript.num_tokens if last.counted is None else last.counted
        return Usage(len(self._submission.prompt_token_ids), num_tokens, last.cached)
