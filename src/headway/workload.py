"""WHAT is sent: prompts as token ids, a pure function of (workload, launch, seed).

The same prompts at every level, so that levels differ in load alone; others in every launch, so
that no launch finds its prompts in a cache of the last. Arrival times have a seed of their own.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from headway.core import Request

Maker = Callable[[random.Random, int], list[int]]
PromptKind = Literal["uniform", "recall"]
MIN_RECALL_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids that a prompt may hold: 0 … size - 1 without the special ones."""

    size: int
    special_ids: tuple[int, ...] = ()

    def ordinary_ids(self) -> list[int]:
        """Return every id that stands for plain text."""
        special = set(self.special_ids)
        return [i for i in range(self.size) if i not in special]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The shape of a workload's requests.

    uniform: every id drawn alike. recall: records at random distances and then a question whose
    answer follows them from one to the next, so that what is right depends on distant context; the
    model tiny_recall knows the answers. Lengths are the same.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    kind: PromptKind = "uniform"
    ignore_eos: bool = True


def make_requests(
    prompts: Prompts, n: int, launch: int, seed: int, vocabulary: Vocabulary
) -> tuple[Request, ...]:
    """Return the first n requests of a launch; fewer are a prefix of more."""
    make = {"uniform": _uniform, "recall": _recall}[prompts.kind](vocabulary)
    requests = []
    for index in range(n):
        draw = random.Random(f"workload/{prompts.name}/{seed}/{launch}/{index}")
        requests.append(
            Request(
                index=index,
                prompt_token_ids=tuple(make(draw, prompts.prompt_tokens)),
                max_tokens=prompts.output_tokens,
                ignore_eos=prompts.ignore_eos,
            )
        )
    return tuple(requests)


def _uniform(vocabulary: Vocabulary) -> Maker:
    ids = vocabulary.ordinary_ids()
    if not ids:
        raise ValueError(f"a vocabulary of {vocabulary.size} ids without an ordinary one")
    return lambda draw, length: draw.choices(ids, k=length)


def _recall(vocabulary: Vocabulary) -> Maker:
    marks = _recall_marks(vocabulary)
    return lambda draw, length: _recall_prompt(draw, marks, length)


# What tiny_recall was trained on; `headway.engines.models.tiny_recall.task` is the other side.
TINY_RECALL = Vocabulary(128, (0, 1, 2, 3))
NUM_FILLER = 11
FILLER_RUNS = (1, 1, 1, 2, 3)
MIN_RECORDS = 2


@dataclass(frozen=True, slots=True)
class _Marks:
    """The ids of a recall prompt by what they do in it."""

    begin: int
    query: int
    then: int
    filler: Sequence[int]
    symbols: Sequence[int]


def _recall_marks(vocabulary: Vocabulary) -> _Marks:
    """Return tiny_recall's own marks; in any other vocabulary ordinary ids stand for them."""
    begin, query, ids = None, None, vocabulary.ordinary_ids()
    if vocabulary == TINY_RECALL:
        begin, _, _, query = vocabulary.special_ids
    elif len(ids) >= 2:
        begin, query, *ids = ids
    then, filler, symbols = ids[:1], ids[1 : 1 + NUM_FILLER], ids[1 + NUM_FILLER :]
    if begin is None or query is None or len(symbols) < MIN_RECORDS:
        raise ValueError(f"recall prompts need more than the {vocabulary.size} ids there are")
    return _Marks(begin, query, then[0], filler, symbols)


def _recall_prompt(draw: random.Random, marks: _Marks, length: int) -> list[int]:
    """Records `a b` between filler, which form one cycle, then `query a then`: what comes next?"""
    if length < MIN_RECALL_TOKENS:
        raise ValueError(f"a recall prompt has at least {MIN_RECALL_TOKENS} tokens, not {length}")
    # Around the records: the begin mark, one filler at least, and the question.
    runs = _filler_runs(draw, length - 5, len(marks.symbols))
    cycle = draw.sample(marks.symbols, len(runs))
    records = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    draw.shuffle(records)
    prompt = [marks.begin]
    for run, record in zip(runs, records, strict=True):
        prompt += [*draw.choices(marks.filler, k=run), *record]
    padding = length - len(prompt) - 3
    return [*prompt, *draw.choices(marks.filler, k=padding), marks.query, cycle[0], marks.then]


def _filler_runs(draw: random.Random, budget: int, most: int) -> list[int]:
    """How much filler stands before each record, for as many records as `budget` tokens hold."""
    runs = [1] * MIN_RECORDS
    used = sum(runs) + 2 * MIN_RECORDS
    while len(runs) < most:
        run = draw.choice(FILLER_RUNS)
        if used + run + 2 > budget:
            break
        runs.append(run)
        used += run + 2
    draw.shuffle(runs)
    return runs


def workload_hash(requests: Sequence[Request]) -> str:
    """Return a short name of the requests: two Runs with the same one sent the same bytes."""
    digest, names = hashlib.sha256(), [field.name for field in fields(Request)]
    for request in requests:
        digest.update(json.dumps([getattr(request, name) for name in names]).encode())
    return digest.hexdigest()[:16]


def pair_key(prompt: Sequence[int], output: Sequence[int]) -> str:
    """Name a (prompt, output) pair: what is verified once, however often it was produced."""
    return hashlib.sha256(json.dumps([list(prompt), list(output)]).encode()).hexdigest()[:24]
