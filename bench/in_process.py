"""An engine driven in the process that it runs in, through its contract: no host, no HTTP.

For what a served load does not tell: where the time of a decode step goes, and how fast an engine
is on a machine on which nothing of ours is installed. Standard library only.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.engines.contract import Engine, Output, Submission
from headway.engines.models.folder import ModelFolder

REQUESTS_PER_SLOT = 4
WARM_TOKENS, WARM_WAVES = 8, 2
# Where an engine that was asked to profile says that its steps' seconds go: each, with `_total`, is
# a sum since its start.
PARTS = ("weights_s", "attention_s", "rest_s", "host_s")
WHOLE = "step_s"
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Served:
    """A closed loop: tokens that left while all slots were busy, and in how many seconds.

    `cut` says that the time was up before the slots ran dry. `tpot_p50_s` is None where no request
    of two tokens came to its end.
    """

    concurrency: int
    tokens: int
    window_s: float
    ended: int
    cut: bool
    tpot_p50_s: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second; None where there were none."""
        return self.tokens / self.window_s if self.tokens and self.window_s > 0 else None


@dataclass(slots=True)
class _Life:
    first_s: float
    last_s: float
    tokens: int


def prompts(folder: ModelFolder, length: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts of random ids without end, none of them special."""
    special, draw = set(folder.special_ids), random.Random(seed)
    ids = [id for id in range(folder.vocab_size) if id not in special]
    while True:
        yield tuple(draw.choices(ids, k=length))


def closed_loop(
    engine: Engine,
    given: Iterator[tuple[int, ...]],
    output_tokens: int,
    concurrency: int,
    limit_s: float,
    clock: Clock = time.perf_counter,
) -> Served:
    """Keep `concurrency` requests in flight, four a slot in all, until the first slot runs dry.

    What is open then, or when `limit_s` is over, is aborted.
    """
    todo = REQUESTS_PER_SLOT * concurrency
    sent, lives, open_ids, tpots = itertools.count(), dict[int, _Life](), set[int](), list[float]()

    def send() -> None:
        id = next(sent)
        open_ids.add(id)
        engine.add(Submission(id, next(given), output_tokens, ignore_eos=True))

    started_s = clock()
    for _ in range(concurrency):
        send()
    tokens, left, now_s, cut = 0, todo - concurrency, started_s, False
    while len(open_ids) == concurrency and not cut:
        outputs = engine.step()
        now_s = clock()
        for output in outputs:
            tokens += _take(output, now_s, lives)
            if output.finish_reason is None:
                continue
            _check(output)
            open_ids.discard(output.id)
            tpots += _tpot(lives.pop(output.id))
            if left:
                left -= 1
                send()
        cut = now_s - started_s >= limit_s and len(open_ids) == concurrency
    ended = todo - left - len(open_ids)
    _abort(engine, open_ids)
    tpot = statistics.median(tpots) if tpots else None
    return Served(concurrency, tokens, now_s - started_s, ended, cut, tpot)


def _take(output: Output, now_s: float, lives: dict[int, _Life]) -> int:
    count = len(output.token_ids)
    life = lives.setdefault(output.id, _Life(now_s, now_s, 0))
    life.last_s, life.tokens = now_s, life.tokens + count
    return count


def _tpot(life: _Life) -> list[float]:
    return [(life.last_s - life.first_s) / (life.tokens - 1)] if life.tokens > 1 else []


def _check(output: Output) -> None:
    if output.finish_reason != "length":
        why = output.error or f"it ended by {output.finish_reason}"
        raise RuntimeError(f"request {output.id} was not answered at length: {why}")


def _abort(engine: Engine, ids: Iterable[int]) -> None:
    for id in ids:
        engine.abort(id)
    while engine.has_work():
        engine.step()


def answers(
    engine: Engine, asked: Sequence[tuple[Sequence[int], int]], salt: str | None = None
) -> list[tuple[int, ...]]:
    """Return the tokens of (prompt, output tokens) that are all in flight together."""
    found: list[list[int]] = [[] for _ in asked]
    for id, (prompt, output_tokens) in enumerate(asked):
        engine.add(Submission(id, tuple(prompt), output_tokens, ignore_eos=True, salt=salt))
    while engine.has_work():
        for output in engine.step():
            found[output.id] += output.token_ids
            if output.finish_reason is not None:
                _check(output)
    return [tuple(tokens) for tokens in found]


def warm_up(engine: Engine, given: Iterator[tuple[int, ...]], concurrency: int) -> None:
    """Let an engine compile, capture and choose what a level needs, before it is timed."""
    for _ in range(WARM_WAVES):
        answers(engine, [(next(given), WARM_TOKENS) for _ in range(concurrency)])


@dataclass(frozen=True, slots=True)
class Split:
    """Where a decode step goes, in seconds a step of `rows` sequences; None for what is not said.

    `wall_s` is the median by our own clock, `parts` are means by the engine's, which costs speed to
    tell.
    """

    rows: int
    steps: int
    wall_s: float | None
    parts: Mapping[str, float | None]

    def shares(self) -> dict[str, float | None]:
        """Return each part as a share of the engine's own step; None where it is not said."""
        whole = self.parts[WHOLE]
        return {
            name.removesuffix("_s"): None if value is None or not whole else value / whole
            for name, value in self.parts.items()
            if name != WHOLE
        }

    def told(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        said = {"rows": self.rows, "steps": self.steps, "wall_s": self.wall_s, **self.parts}
        return said | {f"{name}_share": share for name, share in self.shares().items()}


def decode_split(
    engine: Engine,
    given: Iterator[tuple[int, ...]],
    output_tokens: int,
    rows: int,
    around: Callable[[], Any] | None = None,
) -> Split:
    """Time steps in which `rows` sequences decode and nothing else happens.

    `around`, where it is given, makes a context that these steps run in. RuntimeError for an
    engine that does not run so many together.
    """
    seen: set[int] = set()
    for id in range(rows):
        engine.add(Submission(id, next(given), output_tokens, ignore_eos=True))
    finished = False
    while len(seen) < rows and not finished:
        outputs = engine.step()
        seen |= {output.id for output in outputs}
        finished = any(output.finish_reason is not None for output in outputs)
    if finished:
        _abort(engine, range(rows))
        raise RuntimeError(f"{engine.info.kind} does not decode {rows} sequences together")
    if around is None:
        split = _steps(engine, rows)
    else:
        with around():
            split = _steps(engine, rows)
    _abort(engine, range(rows))
    return split


def _steps(engine: Engine, rows: int) -> Split:
    """Step until the first sequence has ended; the step that ends it is no longer counted."""
    before = after = dict(engine.stats())
    taken: list[float] = []
    while True:
        started_s = time.perf_counter()
        outputs = engine.step()
        if any(output.finish_reason is not None for output in outputs):
            break
        taken.append(time.perf_counter() - started_s)
        after = dict(engine.stats())
    count = max(len(taken), 1)
    parts = {name: _grown(before, after, f"{name}_total", count) for name in (WHOLE, *PARTS)}
    return Split(rows, len(taken), statistics.median(taken) if taken else None, parts)


def _grown(
    before: Mapping[str, float], after: Mapping[str, float], name: str, count: int
) -> float | None:
    """Return by how much a sum grew each time; None where the engine does not say it."""
    return (after[name] - before[name]) / count if name in after and name in before else None
