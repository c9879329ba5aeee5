"""What an engine answered, as it is verified: token ids, or a text and how many tokens it is of."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass

from headway.core import LaunchRecord, RequestRecord
from headway.workload import pair_key

OTHER_IDS = "the server does not count as many tokens in its prompt as the text stands for"
SOME_IDS = "the server did not send the ids of all tokens"
UNCOUNTED = "the server sent no token ids, and not how many tokens its text is of"

Ids = tuple[int, ...]
# Judging asks for the same pairs many times.
key_of = functools.lru_cache(maxsize=1 << 15)(pair_key)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and what an engine answered, to be verified once; it could emit none of `banned`."""

    key: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt and what an engine answered as text alone, of so many tokens; verified once.

    Unless EOS was to be ignored, only the last of them ends an answer. It could emit none of
    `banned`.
    """

    key: str
    prompt: tuple[int, ...]
    text: str
    num_tokens: int
    ignore_eos: bool
    banned: tuple[int, ...] = ()


@functools.lru_cache(maxsize=1 << 15)
def text_key(prompt: Ids, text: str, num_tokens: int, ignore_eos: bool, banned: Ids = ()) -> str:
    """Name a prompt and an answer that came as text."""
    said = json.dumps([prompt, text, num_tokens, ignore_eos, *([banned] if banned else [])])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def answer(prompt: Ids, record: RequestRecord, banned: Ids = ()) -> Pair | TextPair | str:
    """Return what is to be verified of a completed request, or why nothing can be.

    An empty prompt is one of which nobody but the server knows the ids. `banned` could not be
    emitted where the answer was to go on past its end.
    """
    if not prompt:
        return OTHER_IDS
    ids, count = record.output_token_ids, record.completion_tokens
    left_out = banned if record.ignore_eos else ()
    if ids is None:
        text = "".join(event.text for event in record.events)
        return _in_text(prompt, text, count, record.ignore_eos, left_out)
    if count is not None and len(ids) < count:
        return SOME_IDS
    return Pair(key_of(prompt, ids, left_out), prompt, ids, left_out)


def first_answer(prompt: Ids, launch: LaunchRecord, banned: Ids = ()) -> Pair | TextPair | str:
    """Return what is to be verified of a launch's first token, or why it cannot be."""
    if not prompt:
        return OTHER_IDS
    if launch.first_text is not None:
        return _in_text(prompt, launch.first_text, 1, True, banned)
    ids = launch.first_output
    return Pair(key_of(prompt, ids, banned), prompt, ids, banned) if ids else UNCOUNTED


def _in_text(
    prompt: Ids, text: str, num_tokens: int | None, ignore_eos: bool, banned: Ids
) -> TextPair | str:
    if not num_tokens:
        return UNCOUNTED
    key = text_key(prompt, text, num_tokens, ignore_eos, banned)
    return TextPair(key, prompt, text, num_tokens, ignore_eos, banned)
