"""Headway's own gates as detectors: the shipped night on simulated launches.

Nothing of the decision is repeated here. A night is begun, measured and judged by the functions
that `headway run` uses, with its journal on disk; only the lab below it is simulated.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from detectors.detector import Detector, NightOutcome, NotAvailable
from detectors.injections import CANDIDATE, NONE, REFERENCE, Injection
from detectors.layout import Conditions, Layout, Night
from detectors.simulated import SimulatedLab
from headway import baseline, night, proposal, suite, verdict
from headway.engines import fake
from headway.fingerprint import Machine
from headway.history import NightRecord
from headway.results import ModelFacts, Results
from headway.suite import Suite
from headway.verdict import Judged, Memory

FIRST_NIGHT = datetime(2026, 1, 1, tzinfo=UTC)
MODEL = ModelFacts("fake", "1", fake.VOCAB_SIZE, tuple(range(fake.FIRST_ID)))
LEVELS = ("c1", "c2")
TOKENS, REQUESTS = 3, 11
NEW, OLD = "new", "old"


@dataclass(frozen=True, slots=True)
class HeadwayReference:
    """The reference gate at one sensitivity: pairs every night, more on suspicion."""

    sensitivity: str = "5%"
    most: int | None = 40

    @property
    def name(self) -> str:
        """The name in tables."""
        return "headway_reference"

    @property
    def family(self) -> str:
        """It shares draws with no other: it asks for launches as it needs them."""
        return f"{self.name} {self.sensitivity}"

    def run(
        self, conditions: Conditions, injection: Injection, seed: int, num_nights: int
    ) -> list[NightOutcome]:
        """Judge each night of each episode by itself: this gate has no memory.

        So the first night of an episode stands for all, unless each has its own injection.
        """
        loaded = _suite(conditions.layout, reference=self.sensitivity)
        gate = loaded.reference
        assert gate is not None
        if conditions.launches is not None and conditions.launches < gate.first_pairs:
            raise NotAvailable(f"needs {gate.first_pairs} pairs, not {conditions.launches}")
        outcomes = []
        with _folder() as folder:
            for episode in range(num_nights):
                series = conditions.series((seed, episode), injection)
                for number in range(injection.lasts if injection.daily else 1):
                    drawn = series.night(number)
                    results, lab = measured(loaded, conditions.layout, drawn, folder)
                    judged = verdict.judge(results, verdict.Memory())
                    pairs = lab.launches / 2
                    outcomes.append(
                        outcome(conditions.layout, loaded, judged, episode, number, lab, pairs)
                    )
        return outcomes


@dataclass(frozen=True, slots=True)
class HeadwayBaseline:
    """The baseline gate: nights of three launches, recorded, proposed, accepted, then compared.

    After `past` nights the anchor usually has its twenty nights: those in which the machine was
    another one do not count.
    """

    past: int = 28
    most: int | None = 40

    @property
    def name(self) -> str:
        """The name in tables."""
        return "headway_baseline"

    @property
    def sensitivity(self) -> str | None:
        """It has none: its own spread between nights says what it sees."""
        return None

    @property
    def family(self) -> str:
        """It draws whole pasts, and keeps them for every injection."""
        return f"{self.name} {self.past}"

    def run(
        self, conditions: Conditions, injection: Injection, seed: int, num_nights: int
    ) -> list[NightOutcome]:
        """Judge each episode's nights one after the other, by what the nights before left."""
        loaded = _suite(conditions.layout)
        if conditions.launches is not None and conditions.launches < loaded.launches:
            raise NotAvailable(f"needs {loaded.launches} launches, not {conditions.launches}")
        outcomes = []
        for episode in range(num_nights):
            memory = _armed(conditions, seed, episode, self.past)
            series = conditions.series((seed, episode), injection)
            for number in range(injection.lasts):
                drawn = series.night(number)
                judged, record, lab = _remembered(loaded, conditions.layout, drawn, memory)
                memory = replace(memory, nights=(*memory.nights, record))
                outcomes.append(
                    outcome(conditions.layout, loaded, judged, episode, number, lab, None)
                )
        return outcomes


@functools.lru_cache(maxsize=64)
def _armed(conditions: Conditions, seed: int, episode: int, past: int) -> Memory:
    """Return what a clean past leaves: each proposal is accepted as soon as it is made."""
    loaded, memory = _suite(conditions.layout), Memory()
    series = conditions.series((seed, episode), NONE)
    with _folder() as root:
        for number in range(-past, 0):
            drawn = series.night(number)
            _, record, _ = _remembered(loaded, conditions.layout, drawn, memory)
            nights = (*memory.nights, record)
            proposed = proposal.propose(loaded, nights, root)
            for path, _, text in proposed.changes:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            known = {
                case: baseline.load(baseline.path_of(root, "simulated", case))
                for case in loaded.cases()
            }
            memory = Memory(known.get, nights)
    return memory


def _remembered(
    loaded: Suite, layout: Layout, drawn: Night, memory: Memory
) -> tuple[tuple[Judged, ...], NightRecord, SimulatedLab]:
    with _folder() as folder:
        results, lab = measured(loaded, layout, drawn, folder)
    judged = verdict.judge(results, memory)
    return judged, verdict.record_of(results, judged), lab


OURS: dict[str, Detector] = {
    **{
        f"headway_reference {sensitivity}": HeadwayReference(sensitivity)
        for sensitivity in suite.SENSITIVITIES
    },
    "headway_baseline": HeadwayBaseline(),
}


def measured(
    loaded: Suite, layout: Layout, drawn: Night, folder: Path
) -> tuple[Results, SimulatedLab]:
    """Measure and verify one night, as the plugin does; its journal is gone afterwards."""
    cases = dict(zip(_cases(loaded), layout.cases, strict=True))
    arms = {NEW: CANDIDATE, OLD: REFERENCE}
    started = FIRST_NIGHT + timedelta(days=200 + drawn.number)
    lab = SimulatedLab(drawn, arms, cases, started)
    machine = Machine("simulated", "simulated", 1, 1, "simulated", gpu_driver=drawn.driver)
    changed = loaded if drawn.workload == "prompts-1" else _other_prompts(loaded)
    made = night.begin(
        changed,
        machine,
        {"fake": MODEL},
        folder,
        lambda _: lab,
        screen=night.Screen(),
        fresh=True,
    )
    made.expect(changed.cases())
    try:
        night.measure_all(made, made.cases)
        made.verify_all()
        made.finish()
    except LookupError as error:
        raise NotAvailable(f"has too few launches: {error}") from error
    finally:
        shutil.rmtree(made.folder)
    # A journal begins by the wall clock, and many nights begin in one of its seconds here: of these
    # none counts as before another. They are a simulated day apart.
    simulated = started.isoformat(timespec="seconds")
    return replace(made.results, night=f"{started:%Y%m%d}", started_at=simulated), lab


def outcome(
    layout: Layout,
    loaded: Suite,
    judged: tuple[Judged, ...],
    episode: int,
    number: int,
    lab: SimulatedLab,
    pairs: float | None,
) -> NightOutcome:
    """Return what a night said of the candidate, in the words of the bench."""
    names = dict(zip(_cases(loaded), layout.cases, strict=True))
    said = {
        f"{names[cell.case.workload, cell.case.level]} {cell.metric}": cell.verdict
        for cell in judged
        if cell.case.instance == NEW and cell.case.level and cell.metric in layout.gated
    }
    return NightOutcome(
        episode=episode,
        night=number,
        cells=frozenset(name for name, found in said.items() if found == "REGRESSION"),
        faster=frozenset(name for name, found in said.items() if found == "IMPROVEMENT"),
        launches=lab.launches,
        verdicts=Counter(said.values()),
        pairs=pairs,
    )


def _cases(loaded: Suite) -> list[tuple[str, str]]:
    return [(w.name, level.name) for w in loaded.workloads for level in w.levels]


@functools.cache
def _suite(layout: Layout, reference: str | None = None, launches: int = 3) -> Suite:
    """Return a suite with as many cases as the layout; read from TOML like any other."""
    workloads = -(-len(layout.cases) // len(LEVELS))
    left = len(layout.cases)
    text = '[suite]\nmodel = "fake"\n'
    text += "" if reference else f"launches = {launches}\n"
    for number in range(workloads):
        levels = LEVELS[: min(left, len(LEVELS))]
        left -= len(levels)
        concurrency = [int(level[1:]) for level in levels]
        text += f"[workload.w{number}]\nprompt_tokens = 4\noutput_tokens = {TOKENS}\n"
        text += f"requests = {REQUESTS}\nconcurrency = {concurrency}\n"
    text += f'[engine.{NEW}]\nkind = "fake"\n'
    if reference:
        text += f'[engine.{OLD}]\nkind = "fake"\nreference = true\n'
        text += f'[reference]\nsensitivity = "{reference}"\n[baseline]\nmetrics = []\n'
    with _folder() as folder:
        path = folder / "simulated.toml"
        path.write_text(text, encoding="utf-8")
        return suite.load(path)


def _other_prompts(loaded: Suite) -> Suite:
    """Return the suite with prompts of another length: another workload."""
    workloads = tuple(
        replace(w, prompts=replace(w.prompts, prompt_tokens=5)) for w in loaded.workloads
    )
    return replace(loaded, workloads=workloads)


@contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder for journals: in memory where there is such a place, for they are synced."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headway-bench-", dir=where) as folder:
        yield Path(folder)
