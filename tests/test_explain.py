"""Every failure is explained, in one voice; what has one cause is told once."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway import verdict
from headway.core import RequestRecord, Run
from headway.decisions import SCHEMA, Decision, check_cell, stands_for
from headway.plugin.message import told
from headway.report import private
from headway.report.document import document
from headway.report.markdown import escape, markdown
from headway.report.terminal import terminal
from headway.results import Results
from headway.suite import SENSITIVITIES, BaselineGate, Budget, Limit, ReferenceGate, Suite
from headway.verdict import Finding, Judged
from headway.verdict.causes import Cause, causes, spoken
from headway.verdict.movement import Change
from headway.verdict.split import engine_split

OLD, NEW = "old", "new"
LEVELS = (1, 4, 8)


def paired_suite(factory: ModuleType, levels: Sequence[int] = LEVELS, **changes: Any) -> Suite:
    preset = SENSITIVITIES["5%"]
    gate = ReferenceGate(
        OLD,
        (NEW,),
        margin=preset.margin,
        first_pairs=preset.first_pairs,
        max_pairs=preset.max_pairs,
    )
    made = factory.make_suite((OLD, NEW), [factory.level(n) for n in levels], launches=5)
    no_baseline = dataclasses.replace(made.baseline, metrics=())
    made = dataclasses.replace(made, reference=gate, baseline=no_baseline)
    return dataclasses.replace(made, **changes)


def paired(
    factory: ModuleType, new: Any = None, by_level: Mapping[str, Any] | None = None, **more: Any
) -> Results:
    """A night of five pairs; `by_level` gives the candidate another speed at some levels."""
    new = new or factory.Speed(slower=0.1, version="1.1")
    suite = more.pop("suite", None) or paired_suite(factory)
    options = {"spread": 0.002, "seed": 5} | more
    results = factory.make_night({OLD: factory.Speed(), NEW: new}, suite=suite, **options)

    def at_its_speed(run: Run) -> Run:
        speed = (by_level or {}).get(run.level.name)
        if speed is None or run.case.instance != NEW:
            return run
        return factory.make_run(run.case, run.launch, run.level, speed, 1 + 1e-3 * (run.launch % 3))

    runs = tuple(at_its_speed(run) for run in results.runs)
    return factory.verified(dataclasses.replace(results, runs=runs))


def lines_of(
    factory: ModuleType, results: Results, metric: str, level: str = "c4", **memory: Any
) -> tuple[str, ...]:
    judged = factory.judge(results, memory.pop("load", lambda case: None), **memory)
    return factory.cell(judged, NEW, metric, level).findings[0].explanation


def line(lines: Sequence[str], begins: str) -> str:
    """Return the one line that begins so."""
    (found,) = [text for text in lines if text.startswith(begins)]
    return found


def armed(factory: ModuleType, tonight: Results, **more: Any) -> dict[str, Any]:
    """Return what is known before a night: an armed baseline, and the nights that armed it."""
    past = factory.baseline_nights(**more)
    stored = {case: factory.baseline_of(past, case) for case in tonight.suite.cases()}
    return {"load": stored.get, "nights": factory.recorded(past, stored.get)}


# --- whole explanations ------------------------------------------------------------------------


def test_a_slowdown_against_the_reference_is_explained_from_effect_to_command(
    factory: ModuleType,
) -> None:
    """Only the prefill got slower: TTFT by a tenth, the rest as it was."""
    results = paired(factory, factory.Speed(ttft_s=0.066, version="1.1"), spread=0.0)
    budget = Budget(60.0, price_per_hour=36.0)
    results = dataclasses.replace(
        results, suite=dataclasses.replace(results.suite, budget=budget, path="suites/smoke.toml")
    )
    results = with_kernels(results, {NEW: 1.001})
    cell = factory.cell(factory.judge(results), NEW, "ttft_p50")
    message, *lines = told(cell.findings[0]).split("\n  ")
    assert message == (
        "REGRESSION new-w32_16-c4 ttft_p50: 10.0% worse than old (95% interval +10.0% to +10.0% "
        "worse; margin 2.0%; 5 pairs, p 2.1e-09 for the whole family)"
    )
    assert lines == [
        "differs from old: version: 1.0 → 1.1",
        "same direction at c1 (10.0% worse), c8 (10.0% worse): about the same at all levels",
        "the same for both: prompts, arrivals",
        "not the machine, its calibration kernels: memory copy +0.1%, matrix product +0.1%",
        "moved with it: output throughput (2.5% worse); did not: TPOT p50 (0.0%), "
        "peak memory (0.0%), launch time (0.0%), decode step b1 (0.0%)",
        "of TTFT p50's +6.00 ms: engine +6.00 ms, waiting in the client +0.00 ms, "
        "protocol +0.00 ms",
        "tested as one of a family of 9 cells, with a chance of 0.5% of a false SLOWER in a night",
        "measured for 64 seconds, 0.64 at 36 an hour",
        "repeat: headway ab old new --suite smoke --level c4",
        "accept: headway baseline accept --cell new-w32_16-c4:ttft_p50 --reason '...' "
        "--until 2026-12-30",
        "mute: headway baseline mute --cell new-w32_16-c4:ttft_p50 --reason '...' "
        "--until 2026-12-30",
    ]


def test_a_slowdown_against_the_baseline_says_since_when_and_what_changed(
    factory: ModuleType,
) -> None:
    slow = {"a": factory.Speed(), "b": factory.Speed(slower=0.12, version="1.1")}
    first, tonight = (factory.dated(day, slow, spread=0.002, seed=day) for day in (10, 11))
    memory = armed(factory, tonight, spread=0.002)
    record = verdict.record_of(first, factory.judge(first, **memory))
    memory["nights"] = (*memory["nights"], record)
    found = factory.cell(factory.judge(tonight, **memory), "b", "tpot_p50").findings[0]
    assert found.verdict == "REGRESSION"
    lines = found.explanation
    assert "since the last good night, 2026-11-05: version: 1.0 → 1.1" in lines
    assert "differs from the baseline: version: 1.0 → 1.1" in lines
    assert line(lines, "as on 2026-11-05: ") == (
        "as on 2026-11-05: environment, model and prompts; calibration kernels: "
        "matrix product +0.0%, memory copy +0.0%, launch loop +0.0%, Python loop +0.0%"
    )
    assert re.fullmatch(
        r"same direction at c1 \(1\d\.\d% worse\): about the same at all levels",
        line(lines, "same direction"),
    )
    assert re.fullmatch(
        r"moved with it: output throughput \(1.\..% worse\), TTFT p50 \(1.\..% worse\)",
        line(lines, "moved with it"),
    )
    assert "first seen on 2026-11-10, night 2 in a row" in lines
    assert "repeat: headway run smoke.toml --engine b --level c4" in lines
    assert line(lines, "accept: ").endswith("--until 2026-12-11")


def test_a_launch_that_failed_says_what_changed_and_how_to_try_again(factory: ModuleType) -> None:
    good = factory.dated(9)
    dead = factory.dated(10, os="Linux 7 x86_64")
    launches = tuple(
        dataclasses.replace(r, launch_s=None, failure_kind="died", failure="the engine\nended: 1")
        if (r.instance, r.launch) == ("b", 2)
        else r
        for r in dead.launches
    )
    runs = tuple(r for r in dead.runs if (r.case.instance, r.launch) != ("b", 2))
    dead = dataclasses.replace(dead, launches=launches, runs=runs)
    judged = factory.judge(dead, nights=factory.recorded([good]))
    found = factory.cell(judged, "b", "success_rate").findings[0]
    assert told(found).split("\n  ") == [
        "MISSING b-w32_16-c4 success_rate: launch 2 of b failed: the engine ended: 1",
        "since the last good night, 2026-11-09: os: Linux 6 x86_64 → Linux 7 x86_64",
        "as on 2026-11-09: model and prompts; calibration kernels: matrix product +0.0%, "
        "memory copy +0.0%, launch loop +0.0%, Python loop +0.0%",
        "first seen tonight; the last night before was 2026-11-09",
        "repeat: headway run smoke.toml --engine b --level c4",
    ]
    (cause,) = [c for c in causes(judged) if c.verdict == "MISSING"]
    assert cause.headline == (
        f"CAN'T COMPARE b: launch 2 of b failed: the engine ended: 1 ({len(cause.cells)} cells)"
    )
    assert len(cause.cells) == len([c for c in judged if c.verdict == "MISSING"]) > 40


# --- the lines, one by one ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "says"),
    [
        ((0.0, 0.0, 0.1), "not at c1 (0.0%), c4 (0.0%): at this level only"),
        ((0.1, 0.1, 0.1), "the same at all levels"),
        ((0.0, 0.06, 0.12), "it grows with load"),
        ((0.04, 0.08, 0.12), "it grows with load"),
        ((0.12, 0.06, 0.12), "c4 ("),
        ((0.2, 0.15, 0.1), "same direction at c1 ("),
    ],
)
def test_what_the_levels_mean_together_is_said_where_it_is_certain(
    factory: ModuleType, slower: tuple[float, ...], says: str
) -> None:
    speeds = {
        f"c{n}": factory.Speed(slower=s, version="1.1") for n, s in zip(LEVELS, slower, strict=True)
    }
    results = paired(factory, by_level=speeds, spread=0.0)
    text = next(
        (t for t in lines_of(factory, results, "tpot_p50", "c8") if " c1 (" in t), "no line"
    )
    text = text.replace("0.1% worse", "0.0%")
    assert says in text
    meanings = ("at this level only", "the same at all levels", "it grows with load")
    assert sum(meaning in text for meaning in meanings) == any(m in says for m in meanings)


def test_a_level_that_could_not_be_judged_leaves_nothing_to_say_of_all(factory: ModuleType) -> None:
    results = paired(factory)
    runs = tuple(
        dataclasses.replace(r, invalid=("it slept",)) if r.level.name == "c8" else r
        for r in results.runs
    )
    lines = lines_of(factory, dataclasses.replace(results, runs=runs), "tpot_p50")
    assert re.fullmatch(r"same direction at c1 \([\d.]+% worse\)", line(lines, "same direction at"))


def test_a_level_of_which_nothing_is_certain_is_not_named(factory: ModuleType) -> None:
    assert Change("x", 0.03, -0.02, 0.09).goes_with(0.1) is None
    assert Change("x", 0.10, 0.08, 0.12).goes_with(0.1) is True
    assert Change("x", 0.00, -0.01, 0.01).goes_with(0.1) is False
    assert Change("x", -0.10, -0.12, -0.08).goes_with(0.1) is False
    assert Change("x", -0.10, -0.12, -0.08).goes_with(-0.1) is True
    # A tiny change may be certain: it is none of what makes a tenth.
    assert Change("x", 0.01, 0.009, 0.011).goes_with(0.1) is False


def shifted(record: RequestRecord, **by_s: float) -> RequestRecord:
    """Move parts of a request's life: `wait`, `way` and `back` last longer."""
    wait, way, back = (by_s.get(name, 0.0) for name in ("wait", "way", "back"))
    inside = wait + way
    events = tuple(
        dataclasses.replace(
            e, at_s=e.at_s + inside + back, engine_at_s=(e.engine_at_s or 0.0) + inside
        )
        for e in record.events
    )
    assert record.sent_s is not None
    assert record.engine_arrived_s is not None
    assert record.ended_s is not None
    return dataclasses.replace(
        record,
        events=events,
        sent_s=record.sent_s + wait,
        engine_arrived_s=record.engine_arrived_s + inside,
        ended_s=record.ended_s + inside + back,
    )


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"wait": 0.007}, "engine +0.00 ms, waiting in the client +7.00 ms, protocol +0.00 ms"),
        ({"way": 0.007}, "engine +0.00 ms, waiting in the client +0.00 ms, protocol +7.00 ms"),
        ({"back": 0.007}, "engine +0.00 ms, waiting in the client +0.00 ms, protocol +7.00 ms"),
    ],
)
def test_the_part_of_ttft_that_grew_is_named(
    factory: ModuleType, part: dict[str, float], says: str
) -> None:
    results = paired(factory, factory.Speed(), spread=0.0)
    runs = tuple(
        dataclasses.replace(run, records=tuple(shifted(r, **part) for r in run.records))
        if run.case.instance == NEW
        else run
        for run in results.runs
    )
    lines = lines_of(factory, dataclasses.replace(results, runs=runs), "ttft_p50")
    assert f"of TTFT p50's +7.00 ms: {says}" in lines
    assert not [text for text in lines if text.startswith("of TPOT")]
    run = next(run for run in runs if run.case.instance == NEW)
    found = engine_split(run)
    assert found is not None
    assert found.client_wait_p50_s == pytest.approx(0.0001 + part.get("wait", 0.0))
    assert found.engine_ttft_p50_s == pytest.approx(0.0594)
    assert found.engine_tpot_p50_s == pytest.approx(0.012)


def test_a_slower_step_is_the_engine_s_and_without_stamps_nobody_s(factory: ModuleType) -> None:
    slow = factory.Speed(itl_s=0.0132, version="1.1")
    lines = lines_of(factory, paired(factory, slow, spread=0.0), "tpot_p50")
    assert "of TPOT p50's +1.20 ms: engine +1.20 ms, protocol +0.00 ms" in lines
    blind = dataclasses.replace(slow, stamps=False)
    lines = lines_of(factory, paired(factory, blind, spread=0.0), "tpot_p50")
    assert not [text for text in lines if text.startswith("of TPOT")]


def with_kernels(results: Results, factors: Mapping[str, float]) -> Results:
    """Give each Run readings of two kernels; `factors` stretch the copy of an instance's Runs."""

    def reading(run: Run) -> dict[str, float]:
        factor = factors.get(run.case.instance, 1.0)
        return {"matmul": 0.02 * (1 + (factor - 1) / 2), "copy": 0.03 * factor}

    runs = tuple(dataclasses.replace(r, calibration=(reading(r),) * 2) for r in results.runs)
    return dataclasses.replace(results, runs=runs)


def test_kernels_say_whether_it_is_the_machine(factory: ModuleType) -> None:
    def machine(results: Results) -> str:
        return line(lines_of(factory, results, "tpot_p50"), "the machine's calibration kernels: ")

    still = lines_of(factory, with_kernels(paired(factory), {}), "tpot_p50")
    figures = "memory copy +0.0%, matrix product +0.0%"
    assert f"not the machine, its calibration kernels: {figures}" in still
    moved = with_kernels(paired(factory), {NEW: 1.1})
    assert machine(moved).endswith("memory copy +10.0%, matrix product +5.0% moved with it")
    draw = random.Random(1)
    restless = tuple(
        dataclasses.replace(r, calibration=({"matmul": 0.02, "copy": draw.uniform(0.02, 0.04)},))
        for r in paired(factory).runs
    )
    said = machine(dataclasses.replace(paired(factory), runs=restless))
    assert re.search(r": matrix product \+0\.0% did not; memory copy .*% cannot be told$", said)


def test_other_prompts_are_not_called_the_same(factory: ModuleType) -> None:
    results = paired(factory)
    assert "the same for both: prompts, arrivals" in lines_of(factory, results, "tpot_p50")
    runs = tuple(dataclasses.replace(r, workload_hash=f"w{r.case.instance}") for r in results.runs)
    lines = lines_of(factory, dataclasses.replace(results, runs=runs), "tpot_p50")
    assert not [text for text in lines if text.startswith("the same for both")]


def test_lost_pairs_are_named(factory: ModuleType) -> None:
    results = paired(factory)
    runs = tuple(
        dataclasses.replace(r, invalid=("the client slept",))
        if (r.case.instance, r.launch) == (OLD, 2)
        else r
        for r in results.runs
    )
    lines = lines_of(factory, dataclasses.replace(results, runs=runs), "tpot_p50")
    assert line(lines, "dropped: ") == "dropped: pair 2: launch 2 of old: the client slept"


def test_two_equal_engines_differ_in_nothing_that_is_said(factory: ModuleType) -> None:
    lines = lines_of(factory, paired(factory, factory.Speed(slower=0.1)), "tpot_p50")
    assert lines[0] == "differs from old in nothing that is under test"


def test_an_improvement_is_explained_as_well(factory: ModuleType) -> None:
    lines = lines_of(factory, paired(factory, factory.Speed(slower=-0.1)), "tpot_p50")
    assert line(lines, "same direction at").count("% better") == 2
    assert re.search(r"TTFT p50 \(11\.\d% better\)", line(lines, "moved with it: "))
    assert not [text for text in lines if text.startswith(("accept", "mute", "first seen"))]


def test_what_passes_or_records_is_not_explained(factory: ModuleType) -> None:
    for cell in factory.judge(factory.make_night()):
        assert {f.explanation for f in cell.findings} == {()}


def test_another_gate_on_the_cell_is_heard(factory: ModuleType) -> None:
    suite = paired_suite(factory, limits=(Limit("tpot_p50", engine=NEW, max=0.0125),))
    results = paired(factory, suite=suite)
    lines = lines_of(factory, results, "tpot_p50")
    assert line(lines, "the limit gate says SLOWER: ").endswith(
        "at most 12.5 ms is required (95% interval 13.2 ms to 13.2 ms, 80 values)"
    )


def test_a_limit_says_where_else_it_is_broken_and_where_it_holds(factory: ModuleType) -> None:
    suite = factory.make_suite(
        (OLD, NEW),
        [factory.level(n) for n in LEVELS],
        limits=(Limit("tpot_p50", engine=NEW, max=0.0125),),
    )
    fast = {"c1": factory.Speed()}
    lines = lines_of(factory, paired(factory, by_level=fast, suite=suite), "tpot_p50")
    assert "its limit is broken at c8 too; it holds at c1" in lines
    assert not [text for text in lines if text.startswith("accept")]


@pytest.mark.parametrize(
    ("bad_before", "says"),
    [
        ((), "first seen tonight; the last night before was 2026-11-09"),
        ((9,), "first seen on 2026-11-09, night 2 in a row"),
        ((7, 9), "first seen on 2026-11-09, night 2 in a row"),
        ((6, 7, 8, 9), "seen in every night that is known, since 2026-11-06: 5 nights"),
    ],
)
def test_since_when_it_is_so(factory: ModuleType, bad_before: tuple[int, ...], says: str) -> None:
    limits = (Limit("tpot_p50", engine="b", max=0.0125),)
    suite = factory.make_suite(limits=limits)
    slow = {"a": factory.Speed(), "b": factory.Speed(slower=0.1)}

    def night(day: int) -> Results:
        return factory.dated(day, slow if day in (*bad_before, 10) else None, suite=suite)

    records = factory.recorded([night(day) for day in (6, 7, 8, 9)])
    found = factory.cell(factory.judge(night(10), nights=records), "b", "tpot_p50").findings[0]
    assert says in found.explanation
    alone = factory.cell(factory.judge(night(10)), "b", "tpot_p50").findings[0]
    assert "first seen" not in " ".join(alone.explanation)


def test_a_night_that_is_judged_again_does_not_know_what_came_after(factory: ModuleType) -> None:
    suite = factory.make_suite(limits=(Limit("tpot_p50", engine="b", max=0.0125),))
    slow = {"a": factory.Speed(), "b": factory.Speed(slower=0.1)}
    records = factory.recorded(
        [factory.dated(9, suite=suite), factory.dated(11, slow, suite=suite)]
    )
    tonight = factory.dated(10, slow, suite=suite)
    once = factory.judge(tonight, nights=records[:1])
    assert factory.judge(tonight, nights=records) == once


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("suites/smoke.toml", "smoke"),
        ("/x/perf_tests/suites/smoke.toml", "smoke"),
        ("reports/ab/ab_x.toml", "reports/ab/ab_x.toml"),
        ("my suites/odd name.toml", "'my suites/odd name.toml'"),
    ],
)
def test_the_command_names_the_suite_as_it_would_be_found(
    factory: ModuleType, path: str, name: str
) -> None:
    suite = paired_suite(factory, path=path)
    lines = lines_of(factory, paired(factory, suite=suite), "tpot_p50")
    assert line(lines, "repeat: ") == f"repeat: headway ab old new --suite {name} --level c4"


def test_a_launch_as_a_whole_is_repeated_by_its_test(factory: ModuleType) -> None:
    suite = factory.make_suite(limits=(Limit("launch_time", engine="b", max=1.0),))
    judged = factory.judge(factory.make_night(suite=suite))
    found = factory.cell(judged, "b", "launch_time", "").findings[0]
    assert "repeat: headway run smoke.toml --engine b -k launch_time" in found.explanation


# --- causes ------------------------------------------------------------------------------------


def test_two_dozen_red_cells_of_one_cause_are_one_headline_and_one_explanation(
    factory: ModuleType,
) -> None:
    levels = (1, 2, 4, 8, 16, 24, 32, 48)
    results = paired(factory, suite=paired_suite(factory, levels))
    judged = factory.judge(results)
    (cause,) = causes(judged)
    assert len(cause.cells) == 24
    assert re.fullmatch(
        r"SLOWER new: output throughput, TTFT p50, TPOT p50 [\d.]+(-[\d.]+)?% "
        r"at c1, c2, c4, c8 and 4 more \(24 cells\)",
        cause.headline,
    )
    accept = line(cause.explanation, "accept: ")
    pattern = re.search(r"--cell '([^']*)'", accept)
    assert pattern is not None
    check_cell(pattern[1])
    red = {(c.case, c.metric) for c in judged if c.verdict == "REGRESSION"}
    assert all(stands_for(pattern[1], case, metric) for case, metric in red)
    assert line(cause.explanation, "repeat: ").count("--level") == 8
    assert "'" not in line(cause.explanation, "mute: ").partition("--reason")[0]
    made = document(results, judged, headway_version="1")
    for shown in (markdown(made), terminal(made, 200, color=False)):
        assert shown.count("same direction at") == 1
        assert shown.count("SLOWER new") + shown.count("**SLOWER** new") == 1


def test_a_moved_machine_is_one_cause_for_every_engine(factory: ModuleType) -> None:
    night = factory.make_night()
    runs = tuple(
        dataclasses.replace(
            r,
            invalid=(
                f"the machine was not as it was: memory copy {n}.1 % slower than its own median, "
                "band ±3.0 %",
            ),
        )
        for n, r in enumerate(night.runs)
    )
    found = causes(factory.judge(dataclasses.replace(night, runs=runs)))
    assert [(c.verdict, c.instance) for c in found] == [("INVALID", None)]
    assert found[0].headline.startswith("CAN'T TELL: the machine was not as it was: memory copy")
    assert found[0].headline.endswith(" cells of a, b)")
    assert line(found[0].explanation, "repeat: ") == (
        "repeat: headway run smoke.toml --engine a --engine b --level c1 --level c4"
    )


def test_failed_requests_are_one_cause_and_no_slowdown(factory: ModuleType) -> None:
    night = factory.make_night({"a": factory.Speed(fails=3), "b": factory.Speed()})
    first, *rest = causes(factory.judge(night))
    assert first.headline == "SLOWER a: 6 of 24 requests failed (6 http_500), at c1, c4 (44 cells)"
    assert {c.verdict for c in rest} == {"RECORDING"}


def test_engines_and_directions_are_causes_of_their_own(factory: ModuleType) -> None:
    speeds = {
        "a": factory.Speed(slower=0.12),
        "b": factory.Speed(slower=0.12),
        "c": factory.Speed(slower=-0.12),
    }
    tonight = factory.dated(10, speeds, spread=0.002)
    plain = {name: factory.Speed() for name in speeds}
    past = [factory.dated(day, plain, spread=0.002, seed=day) for day in range(1, 6)]
    stored = {case: factory.baseline_of(past, case) for case in tonight.suite.cases()}
    found = causes(factory.judge(tonight, stored.get))
    assert [(c.verdict, c.instance, len(c.cells)) for c in found] == [
        ("REGRESSION", "a", 6),
        ("REGRESSION", "b", 6),
        ("IMPROVEMENT", "c", 6),
    ]
    assert found[2].headline.startswith("FASTER c: output throughput, TTFT p50, TPOT p50 1")


def test_recording_says_how_far_it_is_and_nothing_else(factory: ModuleType) -> None:
    (found,) = causes(factory.judge(factory.make_night()))
    assert found.headline == (
        "CAN'T TELL YET: baselines are recorded, 2 of 10 launches, night 1 of 5 (12 cells of a, b)"
    )
    assert found.explanation == ()


def test_what_is_muted_is_one_cause_and_what_is_suspected_is_another(factory: ModuleType) -> None:
    slow = {"a": factory.Speed(), "b": factory.Speed(slower=0.04)}
    tonight = factory.dated(10, slow, spread=0.002)
    memory = armed(factory, tonight, spread=0.002)
    found = [c for c in causes(factory.judge(tonight, **memory)) if c.instance == "b"]
    assert [c.verdict for c in found] == ["INCONCLUSIVE"]
    assert re.fullmatch(
        r"CAN'T TELL YET b: output throughput, TTFT p50, TPOT p50 [34]\.\d(-4\.\d)?% at c1, c4, "
        r"suspected \(6 cells\)",
        found[0].headline,
    )
    assert line(found[0].explanation, "accept: ")
    mute = Decision(SCHEMA, "mute", "b-*:*", "a new driver", "2026-11-10", "2026-11-20")
    muted, *_ = causes(factory.judge(tonight, **memory, decisions=(mute,)))
    assert (muted.verdict, len(muted.cells)) == ("MUTED", 6)
    assert muted.headline.startswith("CAN'T TELL YET: muted until 2026-11-20: a new driver")


def test_what_is_accepted_passes_and_is_told_all_the_same(factory: ModuleType) -> None:
    slow = {"a": factory.Speed(), "b": factory.Speed(slower=0.12)}
    tonight = factory.dated(10, slow, spread=0.002)
    memory = armed(factory, tonight, spread=0.002)
    accepted = Decision(
        SCHEMA, "accept", "b-*:*", "exact sums", "2026-11-10", "2026-11-20", None, {"b-*:*": 0.13}
    )
    (found,) = causes(factory.judge(tonight, **memory, decisions=(accepted,)))
    assert (found.verdict, len(found.cells)) == ("PASS", 6)
    assert re.fullmatch(
        r"OK b: output throughput, TTFT p50, TPOT p50 1\d\.\d(-1\d\.\d)?% at c1, c4, accepted "
        r"\(6 cells\)",
        found.headline,
    )
    assert "is accepted until 2026-11-20: exact sums" in found.explanation[0]


def test_memory_is_no_speed(factory: ModuleType) -> None:
    limits = (Limit("tpot_p50", engine="b", max=0.001), Limit("peak_memory", engine="b", max=1.0))
    judged = factory.judge(factory.make_night(suite=factory.make_suite(limits=limits)))
    names = [cause.headline for cause in causes(judged) if cause.verdict == "LIMIT"]
    assert [name.split(" 1")[0].split(" 2")[0] for name in names] == [
        "SLOWER b: TPOT p50",
        "SLOWER b: peak memory",
    ]


# --- properties --------------------------------------------------------------------------------


@st.composite
def faults(draw: st.DrawFn) -> dict[str, Any]:
    """What may be wrong with a night, in any combination."""
    return {
        "slower": draw(st.sampled_from((-0.3, -0.03, 0.0, 0.03, 0.1, 0.5))),
        "spread": draw(st.sampled_from((0.0, 0.003, 0.05))),
        "fails": draw(st.sampled_from((0, 0, 2, 99))),
        "stamps": draw(st.booleans()),
        "wrong": draw(st.sampled_from((0, 0, 3))),
        "invalid": draw(st.sampled_from(((), (1,), (1, 2, 3)))),
        "lost": draw(st.sampled_from(((), (2,), (1, 2, 3, 4, 5)))),
        "kernels": draw(st.booleans()),
        "limit": draw(st.booleans()),
        "gated": draw(st.booleans()),
        "remembers": draw(st.booleans()),
        "kind": draw(st.sampled_from(("died", "budget"))),
        "seed": draw(st.integers(0, 99)),
    }


def spoilt(factory: ModuleType, wish: dict[str, Any]) -> tuple[Results, dict[str, Any]]:
    """Return a night with these faults, and what is remembered before it."""
    limits = (Limit("tpot_p50", engine=NEW, over=OLD, max=1.05),) if wish["limit"] else ()
    suite = paired_suite(factory, (1, 4))
    if wish["gated"]:
        gate = BaselineGate(min_launches=5, min_nights=2)
        suite = dataclasses.replace(suite, baseline=gate, limits=(*suite.limits, *limits))
    plain = {OLD: factory.Speed(), NEW: factory.Speed()}
    past = [
        factory.dated(day, plain, suite=suite, spread=0.003, seed=day)
        for day in (1, 2, 3)
        if wish["remembers"]
    ]
    stored = {case: factory.baseline_of(past, case) for case in suite.cases()} if past else {}
    speed = factory.Speed(slower=wish["slower"], fails=wish["fails"], stamps=wish["stamps"])
    options = {"suite": suite, "spread": wish["spread"], "seed": wish["seed"]}
    night = factory.dated(10, {OLD: factory.Speed(), NEW: speed}, **options)
    night = with_kernels(night, {NEW: 1.05}) if wish["kernels"] else night
    night = factory.verified(night, first_wrong=wish["wrong"])
    runs = tuple(
        dataclasses.replace(r, invalid=("it slept",)) if r.launch in wish["invalid"] else r
        for r in night.runs
        if (r.case.instance, r.launch) not in [(NEW, n) for n in wish["lost"]]
    )
    launches = tuple(
        dataclasses.replace(r, launch_s=None, failure_kind=wish["kind"], failure="it was over")
        if r.instance == NEW and r.launch in wish["lost"]
        else r
        for r in night.launches
    )
    night = dataclasses.replace(night, runs=runs, launches=launches)
    return night, {"load": stored.get, "nights": factory.recorded(past, stored.get)}


FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def is_clean(text: str) -> bool:
    odd = re.search(r"\b(None|nan|inf|True|False)\b|-0\.0+%|\(\)|: ?$|; ?;|  |\n", text)
    return bool(text.strip()) and odd is None


@FEW
@given(wish=faults())
def test_explanations_are_whole_and_causes_a_partition(
    factory: ModuleType, wish: dict[str, Any]
) -> None:
    night, memory = spoilt(factory, wish)
    judged = factory.judge(night, **memory)
    assert factory.judge(night, **memory) == judged
    for cell in judged:
        for finding in cell.findings:
            assert all(is_clean(text) for text in finding.explanation), finding.explanation
            assert len(set(finding.explanation)) == len(finding.explanation)
        if cell.fails(strict=False):
            assert line(cell.findings[0].explanation, "repeat: headway ")
    found = causes(judged)
    assert all(spoken(c) is not None for c in judged if c.findings[0].verdict != "PASS")
    said = [name for cause in found for name in cause.cells]
    assert sorted(said) == sorted(
        f"{c.case.name}:{c.metric}" for c in judged if spoken(c) is not None
    )
    for cause in found:
        assert is_clean(cause.headline)
        assert cause.headline.startswith(verdict.WORDS[cause.verdict])
        assert not re.search(r"\b[A-Z]{4,}\b(?<!TTFT)(?<!TPOT)", without_words(cause.headline))
    assert [verdict.ORDER.index(c.verdict) for c in found] == sorted(
        verdict.ORDER.index(c.verdict) for c in found
    )
    assert_one_voice(night, judged, found)


def without_words(headline: str) -> str:
    for word in sorted(verdict.ALL_WORDS, key=len, reverse=True):
        headline = headline.replace(word, "")
    return headline


def assert_one_voice(night: Results, judged: Sequence[Judged], found: Sequence[Cause]) -> None:
    """The same lines stand in JUnit's message, in JSON, in Markdown and in the terminal."""
    made = document(night, judged, headway_version="1", hide=private.here())
    json.dumps(made, allow_nan=False)
    for cell, shown in zip(judged, made["cells"], strict=True):
        assert told(cell.findings[0]).split("\n  ") == [
            shown["message"],
            *shown["findings"][0]["explanation"],
        ]
    assert [cause["headline"] for cause in made["causes"]] == [c.headline for c in found]
    in_markdown = markdown(made).splitlines()
    in_terminal = " ".join(terminal(made, 400, color=False).split())
    for cause in made["causes"]:
        for text in cause["explanation"]:
            assert f"  - {escape(text)}" in in_markdown
            assert text in in_terminal


def test_the_reports_say_of_each_row_what_its_pairs_say(factory: ModuleType) -> None:
    results = paired(factory)
    lost = tuple(
        dataclasses.replace(r, invalid=("the client slept",))
        if (r.case.instance, r.launch, r.level.name) == (OLD, 2, "c4")
        else r
        for r in results.runs
    )
    results = dataclasses.replace(results, runs=lost)
    made = document(results, factory.judge(results), headway_version="1")
    (pairs,) = [
        f["pairs"]
        for c in made["cells"]
        if (c["instance"], c["level"], c["metric"]) == (NEW, "c4", "output_throughput")
        for f in c["findings"]
        if f["gate"] == "reference"
    ]
    assert pairs == {"used": 4, "dropped": ["pair 2: launch 2 of old: the client slept"]}
    assert made["suite"]["reference"] == OLD
    assert made["suite"]["gates"][:3] == ["output_throughput", "ttft_p50", "tpot_p50"]
    rows = [row for row in markdown(made).splitlines() if row.startswith(("| Work", "| w32"))]
    said = {tuple(row.split(" | ")[1:3]): row.split(" | ")[-1] for row in rows}
    assert said["Level", "Engine"] == "Against the reference |"
    assert said["c4", OLD] == " |"
    told_of = r"(1\d|9)\.\d% worse \(\+[\d.]+% to \+[\d.]+%\), 5 pairs \|"
    assert re.fullmatch(told_of, said["c1", NEW])
    assert re.fullmatch(told_of.replace("5 pairs", "4 pairs, 1 dropped"), said["c4", NEW])
    shown = terminal(made, 120, color=False)
    assert re.search(
        r"^new against old, w32_16 c4: .* worse \(.*\), 4 pairs, 1 dropped$", shown, re.M
    )


def test_no_foreign_text_breaks_out_of_a_message(
    factory: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/srv/people/jane")
    hostile = "x\x1b[31m\n| </details> /srv/people/jane/models"
    results = paired(factory, factory.Speed(slower=0.1, version=hostile))
    finding = factory.cell(factory.judge(results), NEW, "tpot_p50").findings[0]
    made = document(results, factory.judge(results), headway_version="1")
    texts = [told(finding), markdown(made), terminal(made, 100, color=False)]
    for text in texts:
        assert "jane" not in text
        assert "\x1b" not in text
    assert all(text.startswith("  ") for text in texts[0].splitlines()[1:])
    assert "</details> ~" not in texts[1]


def test_the_message_begins_with_the_verdict(factory: ModuleType) -> None:
    cell = factory.cell(factory.judge(paired(factory)), NEW, "tpot_p50")
    finding: Finding = cell.findings[0]
    assert told(finding).splitlines()[0] == finding.message
    assert finding.message.split()[0] == "REGRESSION"
