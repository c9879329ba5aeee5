"""Prompts as text: a process that writes ids as a text which becomes exactly those ids again.

    python boot.py headway.engines.texts --model-json '{…}'

A tokenizer reads the text of random ids as other ids, and often as fewer or more: neighbours melt
into one token, half a character is no text. So what a tokenizer would not give back is replaced
until it does, and a text that it never gives back is none.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any, Protocol

from headway.engines import lines
from headway.engines.fake import MODEL, FakeTokenizer
from headway.engines.lines import RefusedRequestError, read_ids
from headway.engines.models.folder import ModelFolder

# A few will do for most prompts, however long: each replaces all that was wrong in the last.
MOST_TRIES = 500
LONGEST_CUT = 8


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def begins(self) -> Sequence[int]:
        """The ids that it puts before a text by itself."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special tokens are added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


def write(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    ordinary: Sequence[int],
    draw: random.Random,
    fixed: Sequence[int] = (),
) -> tuple[list[int], str] | None:
    """Return ids as many as `fixed` and `ids`, and their text; None when no text was found.

    encode(text) is these ids, and they begin with `fixed`. The others are `ids` where that can be,
    and drawn from `ordinary` where it cannot. No white space is at either end: a chat template may
    strip it.
    """
    own, allowed = list(ids), frozenset(ordinary)
    for tries in range(MOST_TRIES):
        whole = [*fixed, *own]
        text = tokenizer.decode(whole)
        again = tokenizer.encode(text)
        if again == whole and text and text == text.strip():
            return whole, text
        if not text or again[: len(fixed)] != list(fixed) or (text != text.lstrip() and not fixed):
            own[0] = draw.choice(ordinary)
            continue
        # What the text became stays what it is, as a rule. Its end may not, once it is cut off from
        # what followed: some of it is drawn anew, as several tokens may be one character.
        kept = [id if id in allowed else draw.choice(ordinary) for id in again[len(fixed) :]]
        if len(kept) >= len(own):
            kept = kept[: max(0, len(own) - 1 - tries % LONGEST_CUT)]
        own = kept + draw.choices(ordinary, k=len(own) - len(kept))
    return None


def open_texts(
    folder: ModelFolder, arguments: argparse.Namespace
) -> tuple[dict[str, Any], lines.CarryOut]:
    """Load a model's tokenizer; ModelError when there is none."""
    tokenizer = load(folder)
    special = set(folder.special_ids)
    ordinary = [id for id in range(folder.vocab_size) if id not in special]

    def carry_out(question: lines.Question) -> dict[str, Any]:
        ids = read_ids(question, "ids", folder.vocab_size)
        fixed = read_ids(question, "fixed", folder.vocab_size, least=0)
        found = write(tokenizer, ids, ordinary, random.Random(str(question.get("seed"))), fixed)
        if found is None:
            raise RefusedRequestError(
                f"the tokenizer of {folder.name} gives no text of {len(fixed) + len(ids)} tokens "
                f"back: each of {MOST_TRIES} became other tokens"
            )
        return {"ids": found[0], "text": found[1]}

    return {"begins": list(tokenizer.begins)}, carry_out


def load(folder: ModelFolder) -> Tokenizer:
    """Return a model's tokenizer; ModelError when its folder has none."""
    if folder.name == MODEL["name"]:
        return FakeTokenizer()
    from headway.engines.models.tokenizer import load_tokenizer  # needs the tokenizers library

    return load_tokenizer(folder)


if __name__ == "__main__":
    lines.main(
        argparse.ArgumentParser(prog="headway.engines.texts", description=__doc__), open_texts
    )
