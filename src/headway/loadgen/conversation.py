"""Requests as they are sent: each by itself, or one after the other's answer."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from headway import sse
from headway.core import Request
from headway.loadgen.payload import Recipient, payload
from headway.transport import Exchange
from headway.workload import following

# Yields the bytes of a turn, and is given what came of it.
Turns = Generator[bytes, Exchange, None]


@dataclass(slots=True)
class Conversation:
    """Turns that follow each other; their requests are number `first`, `first` + 1, … of all.

    `think_s` passes between the end of an answer and the time at which the next turn is due.
    """

    first: int
    turns: Turns
    think_s: float = 0.0

    def following(self, exchange: Exchange) -> bytes | None:
        """Return the turn that follows an answer; None when there is none."""
        try:
            return self.turns.send(exchange)
        except StopIteration:
            return None


def conversations(
    requests: Sequence[Request], recipient: Recipient, think_s: float = 0.0
) -> list[Conversation]:
    """Return the conversations that requests are of; one without a session is one by itself."""
    made, first = [], 0
    for group in in_sessions(requests):
        made.append(Conversation(first, _turns(group, recipient), think_s))
        first += len(group)
    return made


def in_sessions(requests: Iterable[Request]) -> list[list[Request]]:
    """Return requests by session, in their order."""
    keyed = itertools.groupby(
        requests, lambda one: one.index if one.session is None else ("session", one.session)
    )
    return [list(group) for _, group in keyed]


def singles(payloads: Iterable[bytes]) -> list[Conversation]:
    """Return each payload as a conversation of one turn."""
    return [Conversation(number, _once(data)) for number, data in enumerate(payloads)]


def _once(data: bytes) -> Turns:
    yield data


def _turns(requests: Sequence[Request], recipient: Recipient) -> Turns:
    """Yield each turn with all that was said before it; ends early when an answer fails.

    Only what must be known for the next turn is read here, while the clock runs: the ids or the
    text of an answer that has ended.
    """
    request = requests[0]
    for own in [*requests[1:], None]:
        exchange = yield payload(request, recipient)
        if own is None or exchange.error is not None or exchange.status != 200:
            return
        stream = sse.parse(exchange.body)
        turn = None if stream.error is not None else following(own, request, stream.events)
        if turn is None:
            return
        request = turn
