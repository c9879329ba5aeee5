"""Timed bytes of a streamed answer → token events. Pure: no clock, no socket.

An event is stamped with the arrival of the read that completed it, so how the bytes were split
into reads changes nothing but the stamps. A token event carries a non-empty text, reasoning or
tool-argument piece, or token ids; all else (role, empty, usage, comments) is metadata. One parser
reads every dialect, because each event shows its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from headway.core import TokenEvent
from headway.sse.dialects import take
from headway.sse.draft import Draft, Stream, StreamError, finished
from headway.sse.frames import Bytes, events

__all__ = ["Stream", "StreamError", "events", "merged", "parse"]


def parse(chunks: Iterable[tuple[float, Bytes]]) -> Stream:
    """Return what a stream said; raises nothing, whatever the bytes are."""
    draft = Draft()
    for at_s, data in events(chunks):
        if data.strip() == b"[DONE]":
            draft.done = True
        elif draft.error is None:
            take(draft, at_s, data)
    return finished(draft)


def merged(token_events: Sequence[TokenEvent]) -> int:
    """Count the token events of one answer that came in the same read as the one before.

    They left the server earlier than their stamp says, and so did what came with them: the gap
    before such a group is an upper bound, those within it are 0.
    """
    return sum(before.at_s == after.at_s for before, after in pairwise(token_events))
