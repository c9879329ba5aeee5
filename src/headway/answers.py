"""What an engine answered, as it is verified: token ids, or a text and how many tokens it is of."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core import LaunchRecord, RequestRecord
from headway.workload import pair_key

OTHER_IDS = "the server does not count as many tokens in its prompt as the text stands for"
UNCOUNTED = "the server sent no token ids, and not how many tokens its text is of"

# Judging asks for the same pairs many times.
key_of = functools.lru_cache(maxsize=1 << 15)(pair_key)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and what an engine answered, to be verified once."""

    key: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt and what an engine answered as text alone, of so many tokens; verified once.

    Unless EOS was to be ignored, only the last of them ends an answer.
    """

    key: str
    prompt: tuple[int, ...]
    text: str
    num_tokens: int
    ignore_eos: bool


@functools.lru_cache(maxsize=1 << 15)
def text_key(prompt: Sequence[int], text: str, num_tokens: int, ignore_eos: bool) -> str:
    """Name a prompt and an answer that came as text."""
    said = json.dumps([list(prompt), text, num_tokens, ignore_eos])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def answer(prompt: tuple[int, ...], record: RequestRecord) -> Pair | TextPair | str:
    """Return what is to be verified of a completed request, or why nothing can be.

    An empty prompt is one of which nobody but the server knows the ids.
    """
    if not prompt:
        return OTHER_IDS
    ids = record.output_token_ids
    if ids is not None:
        return Pair(key_of(prompt, ids), prompt, ids)
    text = "".join(event.text for event in record.events)
    return _in_text(prompt, text, record.completion_tokens, record.ignore_eos)


def first_answer(prompt: tuple[int, ...], launch: LaunchRecord) -> Pair | TextPair | str:
    """Return what is to be verified of a launch's first token, or why it cannot be."""
    if not prompt:
        return OTHER_IDS
    if launch.first_text is not None:
        return _in_text(prompt, launch.first_text, 1, True)
    ids = launch.first_output
    return Pair(key_of(prompt, ids), prompt, ids) if ids else UNCOUNTED


def _in_text(
    prompt: tuple[int, ...], text: str, num_tokens: int | None, ignore_eos: bool
) -> TextPair | str:
    if not num_tokens:
        return UNCOUNTED
    key = text_key(prompt, text, num_tokens, ignore_eos)
    return TextPair(key, prompt, text, num_tokens, ignore_eos)
