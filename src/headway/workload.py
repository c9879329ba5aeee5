"""WHAT is sent: prompts as token ids, a pure function of (workload, launch, seed).

The same prompts at every level, so that levels differ in load alone; others in every launch, so
that no launch finds its prompts in a cache of the last. Request k is as long in every launch, and
shares its prefix with the same other requests: launches differ in ids alone, so that what is
compared is the same work. Arrival times have a seed of their own.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from headway import lengths
from headway.core import CHAT, PromptPath, Request, TokenEvent
from headway.lengths import Length, Part, Trace

Maker = Callable[[random.Random, int], list[int]]
PromptKind = Literal["uniform", "recall"]
MIN_RECALL_TOKENS = 12
Send = Literal["ids", "text", "chat"]
LATER_FIELDS = frozenset(("session", "turn", "body", "endpoint", "texts"))


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
class Prefix:
    """A beginning that prompts share: `tokens` ids before a prompt's own, which add to its length.

    A request has one with probability `share`, of one of `groups`, each as likely. Its ids are
    others in every launch.
    """

    tokens: int
    groups: int = 1
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Bodies:
    """A file of OpenAI requests that are sent as they are; what it held when it was read."""

    path: str
    sha256: str
    count: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """The shape of a workload's requests.

    uniform: every id drawn alike. recall: records at random distances and then a question whose
    answer follows them from one to the next, so that what is right depends on distant context; the
    model tiny_recall knows the answers.

    Lengths follow one law for prompts and one for outputs, or a mixture of such pairs (`mix`), or
    what was recorded (`trace`, over and over); where `mix` or `trace` says them, the two laws are
    None. With more than one of `turns`, so many requests in a row are a conversation, whose next
    turn is due `think_s` after an answer; lengths are of a turn's own ids. With `bodies` requests
    are a user's own, and nothing here is drawn. With a temperature above 0 outputs are sampled,
    each request with a seed of its own. `send` is the path that prompts take to the server: ids, a
    text that stands for exactly those ids, or that text as a message of a chat.
    """

    name: str
    prompt_tokens: Length | None
    output_tokens: Length | None
    kind: PromptKind = "uniform"
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    mix: tuple[Part, ...] = ()
    trace: Trace | None = None
    prefix: Prefix | None = None
    turns: int = 1
    think_s: float = 0.0
    bodies: Bodies | None = None
    send: Send = "ids"

    @property
    def path(self) -> PromptPath:
        """How prompts reach the server."""
        return self.send if self.bodies is None else "requests_file"

    @property
    def greedy(self) -> bool:
        """Whether each next token is the likeliest one, so that outputs can be verified."""
        return self.temperature == 0


def make_requests(
    prompts: Prompts, n: int, launch: int, seed: int, vocabulary: Vocabulary, again: int = 0
) -> tuple[Request, ...]:
    """Return the first n requests of a launch; fewer are a prefix of more.

    Drawn `again`, their own ids are others; nothing else is.
    """
    make = {"uniform": _uniform, "recall": _recall}[prompts.kind](vocabulary)
    groups = prefix_groups(prompts.prefix, prompts.name, n, seed)
    prefixes = _prefixes(prompts, launch, seed, vocabulary)
    requests = []
    for index, (prompt_tokens, output_tokens) in enumerate(lengths_of(prompts, n, seed)):
        place = f"{prompts.name}/{seed}/{launch}/{index}"
        group = groups[index]
        later = index % prompts.turns  # a turn begins with what was said before it
        begins = () if group is None or later else prefixes[group]
        anew = f"/again/{again}" if again else ""
        own = make(random.Random(f"workload/{place}{anew}"), prompt_tokens)
        requests.append(
            Request(
                index=index,
                prompt_token_ids=(*begins, *own),
                max_tokens=output_tokens,
                ignore_eos=prompts.ignore_eos,
                temperature=prompts.temperature,
                top_p=prompts.top_p,
                seed=None if prompts.greedy else _sampling_seed(place),
                session=index // prompts.turns if prompts.turns > 1 else None,
                turn=later,
            )
        )
    return tuple(requests)


def in_text(request: Request, ids: Sequence[int], text: str, send: Send) -> Request:
    """Return a request that is sent as a text, which stands for exactly these ids."""
    endpoint = CHAT if send == "chat" else request.endpoint
    return replace(request, prompt_token_ids=tuple(ids), texts=(text,), endpoint=endpoint)


def following(own: Request, before: Request, events: Sequence[TokenEvent]) -> Request | None:
    """Return a turn's request as it is sent after an answer; None where the answer's ids lack.

    A chat goes on with the answer's text, of which only the server knows the ids; anything else
    with its ids.
    """
    if before.texts:
        answer = "".join(event.text for event in events if event.kind == "content")
        return replace(own, prompt_token_ids=(), texts=(*before.texts, answer, *own.texts))
    if any(event.token_ids is None for event in events):
        return None
    return continued(own, before, [t for event in events for t in event.token_ids or ()])


def continued(request: Request, before: Request, output: Sequence[int]) -> Request:
    """Return a turn's request as it is sent: what was asked and answered before, then its own."""
    said = (*before.prompt_token_ids, *output, *request.prompt_token_ids)
    return replace(request, prompt_token_ids=said)


def _sampling_seed(place: str) -> int:
    """Return a request's own seed, in the 31 bits that every server takes."""
    return random.Random(f"sampling/{place}").getrandbits(31)


def lengths_of(prompts: Prompts, n: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Return the (prompt, output) lengths of the first n requests, without the shared prefix.

    The same in every launch. A trace that is shorter begins again.
    """
    trace = prompts.trace
    if trace is not None:
        recorded = list(zip(trace.prompt_tokens, trace.output_tokens, strict=True))
        return tuple(recorded[index % len(recorded)] for index in range(n))
    parts = parts_of(prompts)
    return tuple(
        lengths.draw_pair(parts, random.Random(f"lengths/{prompts.name}/{seed}/{index}"))
        for index in range(n)
    )


def parts_of(prompts: Prompts) -> tuple[Part, ...]:
    """Return the mixture that lengths are drawn from, of one part where there is one law."""
    if prompts.prompt_tokens is None or prompts.output_tokens is None:
        return prompts.mix
    return (Part(prompts.prompt_tokens, prompts.output_tokens),)


def extremes(prompts: Prompts, end: int) -> list[tuple[int, int]]:
    """Return the lower (0) or upper (1) bounds of (prompt, output) lengths as they are sent.

    With prefix, and with what a conversation has said at its longest. One pair for each part of a
    mixture, or each recorded request; none where requests are a user's own.
    """
    prefix = prompts.prefix
    more = 0 if prefix is None or (end == 0 and prefix.share < 1) else prefix.tokens
    if prompts.bodies is not None:
        return []
    pairs = (
        list(zip(prompts.trace.prompt_tokens, prompts.trace.output_tokens, strict=True))
        if prompts.trace is not None
        else lengths.pairs_at(parts_of(prompts), end)
    )
    before = (prompts.turns - 1) * max(sum(pair) for pair in pairs) if end else 0
    return [(prompt + more + before, output) for prompt, output in pairs]


def prefix_groups(prefix: Prefix | None, name: str, n: int, seed: int) -> tuple[int | None, ...]:
    """Return which group's prefix each of the first n requests has; None for none.

    The same in every launch.
    """
    if prefix is None:
        return (None,) * n
    draws = (random.Random(f"prefix/{name}/{seed}/{index}") for index in range(n))
    return tuple(
        one.randrange(prefix.groups) if one.random() < prefix.share else None for one in draws
    )


def _prefixes(
    prompts: Prompts, launch: int, seed: int, vocabulary: Vocabulary
) -> list[tuple[int, ...]]:
    """Return the ids of each group's prefix in a launch."""
    prefix = prompts.prefix
    if prefix is None:
        return []
    make = _uniform(vocabulary)
    sources = (
        random.Random(f"prefix_ids/{prompts.name}/{seed}/{launch}/{group}")
        for group in range(prefix.groups)
    )
    return [tuple(make(source, prefix.tokens)) for source in sources]


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
    digest = hashlib.sha256()
    for request in requests:
        # What came later is named only where a request has it: old names stay what they are.
        said = [
            getattr(request, f.name)
            for f in fields(Request)
            if f.name not in LATER_FIELDS or getattr(request, f.name) != f.default
        ]
        digest.update(json.dumps(said).encode())
    return digest.hexdigest()[:16]


def pair_key(prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()) -> str:
    """Name a (prompt, output) pair: what is verified once, however often it was produced.

    Where ids were `banned` from the output, another one is right.
    """
    parts = [list(prompt), list(output), *([list(banned)] if banned else [])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
