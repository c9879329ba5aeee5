"""Token ids to text while they arrive, and stop strings. Pure: no clock, no socket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# Decoding looks back over this many tokens: text before them can no longer change.
WINDOW = 24
# A character is at most four bytes, so after this many tokens without a readable one the bytes
# are no character in the making; all but the last three may go out as they are.
MOST_HELD_TOKENS = 16
REPLACEMENT = "�"


class Detokenizer:
    """Text of a growing sequence of ids: what goes out adds up to exactly `decode(all ids)`.

    What could still change is held back: a character whose bytes are not all there decodes as
    U+FFFD at the end. Only a window of the last tokens is decoded each time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # the window is ids[start:]
        self._sent_in_window = 0  # characters of the window's text that went out
        self._clean_until = 0  # tokens after it are held back
        self._sent: list[str] = []

    def push(self, ids: Sequence[int]) -> str:
        """Take ids in, and return the text that can no longer change."""
        self._ids.extend(ids)
        text = self._decode(self._ids[self._start :])
        held = len(text) - len(text.rstrip(REPLACEMENT))
        if held == 0:
            self._clean_until = len(self._ids)
        elif len(self._ids) - self._clean_until > MOST_HELD_TOKENS:
            held = min(held, 3)
        piece = self._emit(text[: len(text) - held])
        if len(self._ids) - self._start > 2 * WINDOW:
            self._move_window(held)
        return piece

    def finish(self) -> str:
        """Return what was held back: the rest of `decode(all ids)`."""
        text = self._decode(self._ids)
        sent = "".join(self._sent)
        if text.startswith(sent):
            return text[len(sent) :]
        # A tokenizer that rewrites text already sent; what is left of the window is the best.
        return self._decode(self._ids[self._start :])[self._sent_in_window :]

    def _emit(self, stable: str) -> str:
        piece = stable[self._sent_in_window :]
        if piece:
            self._sent.append(piece)
            self._sent_in_window = len(stable)
        return piece

    def _move_window(self, held: int) -> None:
        start = len(self._ids) - WINDOW
        text = self._decode(self._ids[start:])
        if held <= len(text):
            self._start, self._sent_in_window = start, len(text) - held


class StopStrings:
    """Cuts a stream of text where the first stop string is complete.

    How the text was split into pieces changes nothing: of several stop strings the one that is
    complete first counts, and of those that are complete together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Return the text that no stop string can touch any more."""
        if self.hit or not self._stops:
            return "" if self.hit else piece
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that waited for a stop string which did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes to the client for one departure."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Transcript:
    """The text side of one answer: ids in, pieces out, until an end or a stop string."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        eos_ids: Collection[int],
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._eos_ids = eos_ids
        self.num_tokens = 0

    def take(self, token_ids: tuple[int, ...], finish_reason: str | None) -> Piece:
        """Take one departure in. A stop string found sets the finish reason to "stop"."""
        self.num_tokens += len(token_ids)
        shown = token_ids
        if finish_reason == "stop" and shown and shown[-1] in self._eos_ids:
            shown = shown[:-1]  # the id that ended it is no text
        text = self._stops.push(self._detokenizer.push(shown))
        if finish_reason is not None:
            text += self._stops.push(self._detokenizer.finish())
            text += self._stops.finish()
        return Piece(text, token_ids, "stop" if self._stops.hit else finish_reason)
