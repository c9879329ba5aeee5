"""Which tokens spell a text? A server that sends no ids is judged by what its text can stand for.

A text is read again: where that gives as many tokens as were counted, they are judged like any
others. Often it gives others: special tokens are not written, a stream holds back the bytes of a
character that is not complete, and many ids read as one text. Then the reference writes it anew,
token by token, and takes at each place the likeliest of the tokens that still spell the text.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from headway.engines.models.scores import Scores, summarise

# What stands in a text for bytes that are no character, or not one yet.
INCOMPLETE = "\ufffd"


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special tokens are added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class Option:
    """A token that may come next: how far its logit is below the best, and how many are above.

    `margin` is the best logit minus the second best, `logprob` in nats.
    """

    token: int
    gap: float = 0.0
    rank: int = 0
    margin: float = 0.0
    logprob: float = 0.0


# Yields the tokens that may come next, best first and never none; is sent the one that came.
Options = Generator[Sequence[Option], int, None]


class Reference(Protocol):
    """Something that knows the right tokens of a model."""

    def score(
        self, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()
    ) -> Scores:
        """Judge an output that could hold none of `banned`."""

    def options(self, prompt: Sequence[int], epsilon: float, banned: Sequence[int] = ()) -> Options:
        """Continue a prompt; an option's gap is at most `epsilon`, and none is `banned`."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text that a server sent as `num_tokens` tokens; one of `ends` can only be the last, and
    one of `banned` none of them."""

    text: str
    num_tokens: int
    ends: Collection[int] = ()
    banned: Sequence[int] = ()


def judge(
    reference: Reference, tokenizer: Tokenizer, prompt: Sequence[int], given: Text, epsilon: float
) -> dict[str, Any]:
    """Return what `summarise` says of the tokens of a text, `by` what they were found.

    `differs_at` is None, or the character from which on no tokens within `epsilon` spell the text.
    """
    forced: dict[str, Any] | None = None
    readings = _readings(tokenizer, given)
    for ids in readings:
        found = summarise(reference.score(prompt, ids, given.banned), ids, epsilon)
        if forced is None or found["max_gap"] < forced["max_gap"]:
            forced = {**found, "by": "ids", "differs_at": None}
    if forced is not None and not forced["num_nonargmax"]:
        return forced
    chosen, differs_at = spell(reference.options(prompt, epsilon, given.banned), tokenizer, given)
    if differs_at is None:
        ids = [option.token for option in chosen]
        found = summarise(_scores(chosen), ids, epsilon)
        if forced is None or (ids not in readings and found["max_gap"] < forced["max_gap"]):
            forced = {**found, "by": "text", "differs_at": None}
        return forced
    if forced is not None and not forced["num_violations"]:
        return forced
    return {
        "num_tokens": given.num_tokens,
        "max_gap": 0.0,
        "num_nonargmax": 0,
        "min_margin": None,
        "nonargmax": [],
        "by": "text",
        "differs_at": differs_at,
    }


def _readings(tokenizer: Tokenizer, given: Text) -> list[list[int]]:
    """Return the ids that a text is read as, where they are as many; an end is not written."""
    read = tokenizer.encode(given.text)
    readings = [read, *([*read, end] for end in given.ends)]
    return [
        ids
        for ids in readings
        if len(ids) == given.num_tokens and tokenizer.decode(ids) == given.text
    ]


def spell(options: Options, tokenizer: Tokenizer, given: Text) -> tuple[list[Option], int | None]:
    """Return the likeliest tokens that spell a text, and None; or where the text leaves them."""
    chosen: list[Option] = []
    ids: list[int] = []
    near = next(options)
    while True:
        last = len(ids) + 1 == given.num_tokens
        fit = next((one for one in near if _fits(tokenizer, [*ids, one.token], given, last)), None)
        if fit is None:
            best = tokenizer.decode([*ids, near[0].token])
            return chosen, _common(best, given.text)
        chosen.append(fit)
        ids.append(fit.token)
        if last:
            return chosen, None
        near = options.send(fit.token)


def _fits(tokenizer: Tokenizer, ids: Sequence[int], given: Text, last: bool) -> bool:
    """Whether a text can begin with these tokens, or be these tokens where they are all."""
    if last:
        return given.text in shown(tokenizer, ids)
    piece = tokenizer.decode(ids)
    held = piece.endswith(INCOMPLETE)
    begun = piece.rstrip(INCOMPLETE) if held else piece
    return ids[-1] not in given.ends and (
        given.text.startswith(begun) or (held and piece.startswith(given.text))
    )


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> set[str]:
    """Return the texts that a stream of these tokens may have shown when it ended.

    Of a character that is not complete at the end, nothing or a mark; or nothing of the tokens
    that began it.
    """
    texts, k = {tokenizer.decode(ids)}, len(ids)
    while k and (text := tokenizer.decode(ids[:k])).endswith(INCOMPLETE):
        k -= 1
        texts |= {text.rstrip(INCOMPLETE), tokenizer.decode(ids[:k])}
    return texts


def _common(one: Iterable[str], other: Iterable[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _scores(chosen: Sequence[Option]) -> Scores:
    return Scores(
        gaps=[one.gap for one in chosen],
        ranks=[one.rank for one in chosen],
        margins=[one.margin for one in chosen],
        best=[one.token for one in chosen],  # unknown where another was taken; nobody reads it
        logprobs=[one.logprob for one in chosen],
    )
