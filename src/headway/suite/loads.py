"""The tables of a suite that say what load is put on an engine: workloads and their levels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway import arrivals, stats
from headway.core import Level, Slo, Stage
from headway.lengths import Trace
from headway.suite.prompting import PROMPT_KEYS, PromptReader
from headway.suite.shape import Workload
from headway.workload import Prompts

# (metric family, percentile) of names such as ttft_p99; metrics.TABLE has the whole list, and the
# plan checks names against it.
PERCENTILE = re.compile(r"_p(\d+)$")
MIN_REQUESTS_PER_SLOT = 4
MIN_OPEN_REQUESTS = 32
# All requests are made before the first is sent: more are a mistake, or days of load.
MAX_REQUESTS = 1_000_000
# Keys that make one level each, of their own name; the others are lists with a level an entry.
ONE_LEVEL = ("ramp", "stages")
GatesOf = Callable[[str], Sequence[str]]


def level_names(table: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, level's name) for every level that a workload's table makes.

    `value` is the entry of the key's list; for a key that makes one level, what it holds.
    """
    for key, mark in (("concurrency", "c"), ("rate_per_s", "r")):
        yield from ((key, value, f"{mark}{value:g}") for value in table.get(key, []))
    yield from ((key, table[key], key) for key in ONE_LEVEL if key in table)
    speeds = table.get("replay_speed", [1]) if "replay" in table else []
    for speed in speeds:
        yield "replay_speed", speed, "replay" if speed == 1 else f"replay_x{speed:g}"


@dataclass(frozen=True, slots=True)
class Given:
    """What the rest of the suite says of a workload: its gates per level, the seed, the time."""

    gates: GatesOf
    seed: int
    level_timeout_s: float


class LoadReader(PromptReader):
    """Reads workloads."""

    def workload(self, name: str, table: Any, given: Given) -> Workload:
        """Read one workload with its levels."""
        where = f"workload.{name}"
        if not isinstance(table, dict):
            raise self.fail(where, f"is {table!r}; it must be a table")
        self.known(where, table, _WORKLOAD_KEYS)
        prompts = self.prompts(where, self.name(where, name), table)
        levels = self._levels(where, table, prompts, given)
        if not levels:
            keys = "concurrency, rate_per_s, ramp, stages, replay"
            raise self.fail(where, f"has none of {keys}: it selects nothing")
        names = [level.name for level in levels]
        for twice in (name for name in names if names.count(name) > 1):
            raise self.fail(where, f"has two levels with the name {twice}")
        limits = self.positives(where, table, "slo", ("ttft_s", "tpot_s", "e2el_s"))
        slo = Slo(**limits) if limits is not None else None
        return Workload(prompts, tuple(replace(level, slo=slo) for level in levels))

    def _levels(
        self, where: str, table: Mapping[str, Any], prompts: Prompts, given: Given
    ) -> list[Level]:
        trace, bodies = prompts.trace, prompts.bodies
        held = None if bodies is None else bodies.count
        asked = self.positive(where, table, "requests", int, held)
        if bodies is not None and asked > bodies.count:
            message = f"is {asked}; {bodies.path} holds {bodies.count}, and each is sent once"
            raise self.fail(f"{where}.requests", message)
        fill_s = self.at_least_0(where, table, "fill_s", None)
        for key in ("concurrency", "rate_per_s", "replay_speed"):
            self.numbers(where, table, key)
        if "replay_speed" in table and trace is None:
            raise self.fail(f"{where}.replay_speed", "needs replay: it is how fast that is sent")
        process, burstiness = self._process(where, table)
        levels = []
        for key, value, name in level_names(table):
            self.name(f"{where}.{key}", name)
            if key == "concurrency":
                levels.append(self._closed(where, name, value, asked, given, fill_s))
            elif key == "rate_per_s":
                count = max(self._floor(where, given.gates(name), asked), MIN_OPEN_REQUESTS)
                level = Level(name, asked or count, rate_per_s=float(value), arrivals=process)
                levels.append(replace(level, burstiness=burstiness))
            else:
                level = Level(name, 0, arrivals=process, burstiness=burstiness)
                if key == "replay_speed":
                    level = Level(name, 0, arrivals="replay", speed=float(value))
                else:
                    stages = self._stages(f"{where}.{key}", value)
                    level = replace(level, stages=stages)
                levels.append(self._timed(f"{where}.{key}", level, trace, given))
        if asked is not None and levels and all(lv.stages or lv.speed for lv in levels):
            message = "is for no level: ramp, stages and replay say how many requests they are"
            raise self.fail(f"{where}.requests", message)
        return levels

    def _process(self, where: str, table: Mapping[str, Any]) -> tuple[str, float | None]:
        """Return the arrival process and its burstiness; gaps that do not vary are constant."""
        process = self.get(where, table, "arrivals", str, "poisson")
        self.choice(f"{where}.arrivals", process, arrivals.PROCESSES)
        burstiness, key = table.get("burstiness"), f"{where}.burstiness"
        if process != "gamma":
            if burstiness is not None:
                raise self.fail(key, f"is of arrivals = 'gamma'; they are {process!r} here")
            return process, None
        if burstiness is None:
            raise self.fail(key, "is missing: 1 is Poisson, less is burstier, inf is constant")
        number = isinstance(burstiness, int | float) and not isinstance(burstiness, bool)
        if not number or not burstiness >= arrivals.MIN_BURSTINESS:
            least = f"a number, at least {arrivals.MIN_BURSTINESS:g}"
            raise self.fail(key, f"is {burstiness!r}; it must be {least}")
        return ("constant", None) if math.isinf(burstiness) else (process, float(burstiness))

    def _stages(self, where: str, value: Any) -> tuple[Stage, ...]:
        """Read a ramp, { from, to, seconds }, or a list of such and of { rate_per_s, seconds }."""
        ramp = where.endswith(".ramp")
        stages = [value] if ramp else value
        fine = isinstance(stages, list) and stages and all(isinstance(s, dict) for s in stages)
        if not fine:
            shape = "a table { from, to, seconds }"
            if not ramp:
                shape = "a list of tables { rate_per_s, seconds } or { from, to, seconds }"
            raise self.fail(where, f"is {value!r}; it must be {shape}")
        found = []
        for number, stage in enumerate(stages):
            here = where if ramp else f"{where}[{number}]"
            flat = "rate_per_s" in stage and not ramp
            keys = ("rate_per_s", "seconds") if flat else ("from", "to", "seconds")
            self.known(here, stage, keys)
            for key in keys:
                if key not in stage:
                    raise self.fail(f"{here}.{key}", f"is missing; a stage has {', '.join(keys)}")
            seconds = self.positive(here, stage, "seconds", float, None)
            rates = [self.at_least_0(here, stage, key, None) for key in keys[:-1]]
            found.append(Stage(rates[0], seconds, *([] if flat else rates[1:])))
        return tuple(found)

    def _timed(self, where: str, level: Level, trace: Trace | None, given: Given) -> Level:
        """Return a level whose schedule says how many requests it has, once it is drawn."""
        if level.stages:
            expected, seconds = arrivals.expected_until(level.stages)[-1], _seconds(level.stages)
            if expected > MAX_REQUESTS:
                message = f"makes about {expected:.3g} requests; at most {MAX_REQUESTS:,}"
                raise self.fail(where, message)
            level = replace(level, rate_per_s=expected / seconds)
        due = arrivals.schedule(level, given.seed, 1, trace)
        if level.speed is not None and due[-1] > 0:
            level = replace(level, rate_per_s=len(due) / due[-1])
        if due and due[-1] >= given.level_timeout_s:
            limit = f"suite.level_timeout_s is {given.level_timeout_s:g}"
            raise self.fail(where, f"lasts {due[-1]:.0f} s; {limit}")
        if not due:
            raise self.fail(where, f"makes no request as the seed {given.seed} draws it")
        for metric, need in _needs(given.gates(level.name)):
            if len(due) < need:
                message = f"makes {len(due)} requests; the gate on {metric} needs at least {need}"
                raise self.fail(where, message)
        return replace(level, num_requests=len(due))

    def _floor(self, where: str, gates: Sequence[str], asked: int | None) -> int:
        """Return the requests a level needs for every gate; refuse an explicit number below it."""
        floor = 1
        for metric, need in _needs(gates):
            if asked is not None and asked < need:
                raise self.fail(
                    f"{where}.requests",
                    f"is {asked}; the gate on {metric} needs at least {need} requests a level",
                )
            floor = max(floor, need)
        return floor

    def _closed(
        self,
        where: str,
        name: str,
        concurrency: Any,
        asked: int | None,
        given: Given,
        fill_s: float | None,
    ) -> Level:
        if type(concurrency) is not int:
            raise self.fail(f"{where}.concurrency", f"holds {concurrency!r}; whole numbers only")
        need = MIN_REQUESTS_PER_SLOT * concurrency
        if asked is not None and asked < need:
            raise self.fail(
                f"{where}.requests",
                f"is {asked}; concurrency {concurrency} needs at least {need} (4 a slot)",
            )
        floor = self._floor(where, given.gates(name), asked)
        if fill_s is None:
            fill_s = arrivals.default_fill_s(concurrency)
        filled = fill_s if concurrency > 1 else 0.0
        return Level(name, asked or max(need, floor), concurrency=concurrency, fill_s=filled)


def _seconds(stages: Sequence[Stage]) -> float:
    return math.fsum(stage.seconds for stage in stages)


def _needs(gates: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each gated metric with the requests that it needs: at least one."""
    for metric in gates:
        match = PERCENTILE.search(metric)
        in_range = match is not None and int(match[1]) < 100
        yield metric, stats.min_samples(float(match[1])) if match and in_range else 1


_WORKLOAD_KEYS = (
    *PROMPT_KEYS,
    *("concurrency", "fill_s", "rate_per_s", "arrivals", "burstiness", "ramp", "stages"),
    *("replay_speed", "requests", "slo"),
)
