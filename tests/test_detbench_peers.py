"""DETBENCH without our own gates: noise, injections, rules of others, real tools, scores."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import detectors as bench
import detectors.detector
import detectors.episodes
import detectors.injections
import detectors.layout
import detectors.noise
import detectors.peers
import detectors.real_tools
import detectors.record
import detectors.recordings
import detectors.scores
import detectors.table
import detectors.work
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench" / "detectors"

CANDIDATE, REFERENCE = bench.injections.CANDIDATE, bench.injections.REFERENCE
INJECTIONS, PRESETS = bench.injections.INJECTIONS, bench.noise.PRESETS
LAYOUT = bench.layout.SIMULATED
SILENT = bench.noise.Preset("silent", 0.0, 0.0, 0.0, 0.0)


def values(series: Any, number: int, arms: str) -> Any:
    """[launch, case, metric] of a night with these launches, `c` and `r`."""
    night = series.night(number)
    names = {"c": CANDIDATE, "r": REFERENCE}
    return np.stack([night.launch(names[arm]).values for arm in arms])


# Noise


def test_the_suite_has_24_gated_cells_and_a_tail():
    assert LAYOUT.mask(LAYOUT.gated).sum() == 24
    assert set(LAYOUT.metrics) - set(LAYOUT.gated) == {"ttft_p99"}


def test_the_presets_are_those_of_the_issue():
    assert set(PRESETS) == {"dedicated", "shared", "hostile", "bimodal", "fleet"}
    shared = PRESETS["shared"]
    assert (shared.night, shared.start, shared.drift, shared.run) == (0.02, 0.007, 0.006, 0.006)
    assert (shared.burst, shared.bad_night) == (0.03, 0.02)
    assert replace(
        PRESETS["hostile"], name="shared", night=0.02, burst=0.03, bursts_last=False
    ) == (shared)
    assert replace(PRESETS["bimodal"], name="shared", slow_start=0.0) == shared
    assert replace(PRESETS["fleet"], name="shared", units=1, unit=0.0) == shared
    assert PRESETS["dedicated"].bad_night == PRESETS["dedicated"].burst == 0.0


@pytest.mark.parametrize("source", ["night", "start", "drift", "run"])
def test_each_source_has_its_standard_deviation_and_its_reach(source):
    preset = replace(SILENT, **{source: 0.05})
    drawn = np.stack([values(preset.series((3,)), n, "crcr") for n in range(1500)])[..., :3]
    assert drawn.std() == pytest.approx(0.05, rel=0.08)
    # What is common, as the share of the variance that two values have in common.
    within = {
        "metrics of a run": (drawn[:, 0, 0, 0], drawn[:, 0, 0, 1]),
        "runs of a launch": (drawn[:, 0, 0, 0], drawn[:, 0, 1, 0]),
        "arms": (drawn[:, 0, 0, 0], drawn[:, 1, 0, 0]),
        "launches of an arm": (drawn[:, 0, 0, 0], drawn[:, 2, 0, 0]),
        "nights": (drawn[:-1, 0, 0, 0], drawn[1:, 0, 0, 0]),
    }
    expected = {
        "night": (1.0, 1.0, 1.0, 1.0, 0.0),
        "start": (1.0, 1.0, 0.0, 0.0, 0.0),
        "drift": (1.0, 1.0, 0.9, 0.81, 0.0),
        "run": (1.0, 0.0, 0.0, 0.0, 0.0),
    }[source]
    for (name, pair), want in zip(within.items(), expected, strict=True):
        assert np.corrcoef(*pair)[0, 1] == pytest.approx(want, abs=0.08), name


def test_bursts_bad_nights_and_slow_starts_come_as_often_as_they_should():
    drawn = np.stack([values(replace(SILENT, burst=0.1).series((1,)), n, "c") for n in range(800)])
    cells = drawn[..., 0].ravel()
    assert (cells > 0.01).mean() == pytest.approx(0.1 * math.exp(-0.01 / 0.08), abs=0.015)
    assert cells[cells > 0.01].mean() == pytest.approx(0.01 + 0.08, abs=0.012)
    preset = replace(SILENT, bad_night=0.2)
    nights = np.array([values(preset.series((1,)), n, "c")[0, :, 0].mean() for n in range(1500)])
    assert (nights > 0.02).mean() == pytest.approx(0.2, abs=0.03)
    bad = nights[nights > 0.02]
    assert 0.04 < bad.min() < 0.07 < 0.28 < bad.max() < 0.31
    preset = replace(SILENT, slow_start=0.1)
    starts = np.array([values(preset.series((1,)), n, "c")[0, :, 0].mean() for n in range(1500)])
    assert (starts > 0.03).mean() == pytest.approx(0.1, abs=0.03)
    assert starts[starts > 0.03].mean() == pytest.approx(0.06, abs=0.001)


def test_a_night_of_a_fleet_runs_on_one_of_its_machines():
    series = replace(SILENT, units=4, unit=0.03).series((2,))
    by_machine: dict[str, list[float]] = {}
    for number in range(80):
        night = series.night(number)
        mean = float(night.launch(CANDIDATE).values[:, :3].mean())
        by_machine.setdefault(night.machine, []).append(mean)
    assert set(by_machine) == {f"unit-{k}" for k in range(4)}
    assert all(max(means) - min(means) < 0.006 for means in by_machine.values())
    assert statistics.stdev(statistics.mean(means) for means in by_machine.values()) > 0.005


@settings(max_examples=40, deadline=None)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    number=st.integers(-300, 300),
    seed=st.integers(0, 2**31),
    arms=st.text("cr", min_size=1, max_size=8),
    more=st.integers(0, 3),
)
def test_a_night_is_the_same_however_it_is_asked(preset, number, seed, arms, more):
    series = PRESETS[preset].series((seed, 1))
    once = values(series, number, arms)
    values(series, number + 1, "c" * (more + 1))
    night = series.night(number)
    for place, want in enumerate(once):
        night.calibrate()
        draw = night.launch(REFERENCE)  # an unchanged engine has the same luck on either side
        assert draw.place == place
        assert np.array_equal(draw.values, want)
    assert not np.array_equal(once, values(series, number + 1, arms))


def test_the_kernels_see_most_of_the_machine_and_nothing_of_the_engine():
    for preset, sees in (
        (replace(SILENT, night=0.05), 0.8),
        (replace(SILENT, drift=0.05), 0.8),
        (replace(SILENT, start=0.05), 0.0),
        (replace(SILENT, run=0.05), 0.0),
        (replace(SILENT, burst=0.5), 0.0),
        (replace(SILENT, burst=0.5, bursts_last=True), 0.8),
    ):
        draws = [preset.series((4,)).night(n).launch(CANDIDATE) for n in range(300)]
        cells = np.concatenate([draw.values[:, 0] for draw in draws])
        for kernels in ([d.before for d in draws], [d.after for d in draws]):
            read = np.concatenate(kernels)[:, 2]
            assert np.polyfit(cells, read, 1)[0] == pytest.approx(sees, abs=0.03)
            assert (read - sees * cells).std() == pytest.approx(0.005, rel=0.15)


def test_a_run_and_a_reading_are_what_a_lab_needs():
    night = PRESETS["shared"].series((1,), INJECTIONS["failures"]).night(0)
    draw = night.launch(CANDIDATE)
    run = draw.run("code-c16")
    assert run.values["tpot_p50"] == draw.values[6, 2]
    assert run.failed == 0.01
    before, after = run.calibration
    assert set(before) == set(after) == {"matmul", "copy", "launch", "python"}
    assert before["matmul"] == pytest.approx(0.020 * math.exp(draw.before[6, 0]))
    assert night.launch(REFERENCE).failed == 0.0
    assert set(night.calibrate()) == set(before)


def test_nights_go_on_without_end():
    nights = bench.noise.nights(PRESETS["shared"], 7, first=-2)
    assert [next(nights).number for _ in range(4)] == [-2, -1, 0, 1]


# Injections


def added(name: str, number: int, arm: str = CANDIDATE) -> Any:
    """What an injection adds to a night, seen from outside."""
    with_it = PRESETS["shared"].series((5,), INJECTIONS[name])
    without = PRESETS["shared"].series((5,))
    letter = "c" if arm == CANDIDATE else "r"
    return np.round(values(with_it, number, letter)[0] - values(without, number, letter)[0], 9)


@pytest.mark.parametrize("name", INJECTIONS)
def test_nothing_is_injected_into_the_past(name):
    assert not added(name, -1).any()
    assert not added(name, -1, REFERENCE).any()


@pytest.mark.parametrize(
    ("name", "cells", "effect"),
    [
        ("1%", 32, 0.01),
        ("10%", 32, 0.10),
        ("improvement", 32, -0.05),
        ("tail", 8, 0.20),
        ("one_level", 8, 0.05),
        ("one_metric", 16, 0.05),
    ],
)
def test_the_candidate_alone_is_slower_where_it_should_be(name, cells, effect):
    for number in (0, 2):
        found = added(name, number)
        assert found[found != 0] == pytest.approx([math.log1p(effect)] * cells)
        assert np.array_equal(found != 0, INJECTIONS[name].touched(LAYOUT))
        assert not added(name, number, REFERENCE).any()


def test_where_a_tail_a_level_and_a_metric_are():
    names = {name: LAYOUT.names(INJECTIONS[name].touched(LAYOUT)) for name in INJECTIONS}
    assert {cell.split()[1] for cell in names["tail"]} == {"ttft_p99"}
    assert {cell.split()[0] for cell in names["one_level"]} == {"chat-c64", "code-c64"}
    assert {cell.split()[1] for cell in names["one_metric"]} == {"ttft_p50", "ttft_p99"}
    assert names["none"] == names["bad_night"] == names["workload"] == frozenset()


def test_drift_grows_every_night_for_ten():
    steps = [added("drift", n)[0, 0] for n in range(10)]
    assert steps == pytest.approx([(n + 1) * math.log1p(0.003) for n in range(10)])
    assert INJECTIONS["drift"].lasts == 10


def test_what_happens_to_the_machine_happens_to_both_arms_and_the_kernels():
    assert (added("bad_night", 0) == added("bad_night", 0, REFERENCE)).all()
    assert added("bad_night", 0) == pytest.approx(math.log1p(0.15))
    assert not added("bad_night", 1).any()
    for name, effect in (("driver_slower", 0.02), ("driver_faster", -0.02)):
        assert added(name, 2, REFERENCE) == pytest.approx(math.log1p(effect))
        series = PRESETS["shared"].series((5,), INJECTIONS[name])
        plain = PRESETS["shared"].series((5,))
        assert series.night(-1).driver == plain.night(0).driver != series.night(0).driver
        seen = series.night(0).launch("any").before - plain.night(0).launch("any").before
        assert seen == pytest.approx(0.8 * math.log1p(effect))
    series = PRESETS["shared"].series((5,), INJECTIONS["workload"])
    assert series.night(-1).workload != series.night(0).workload
    assert (added("workload", 0) == added("workload", 0, REFERENCE)).all()


# The rules of others, against the same rule written slowly


def made_up(seed: int, spread: float = 0.03) -> tuple[Any, Any]:
    """A past and a tonight that hold something for every rule to find."""
    rng = np.random.default_rng(seed)
    past = rng.normal(0.0, spread, (100, 3, *LAYOUT.shape))
    past[rng.random(100) < 0.05] += 0.3  # outliers
    tonight = rng.normal(0.0, spread, (10, *LAYOUT.shape))
    tonight += rng.choice([-0.4, -0.1, 0.0, 0.05, 0.1, 0.3, 0.6], LAYOUT.shape)
    anchor = rng.normal(0.0, spread, (10, *LAYOUT.shape))
    return bench.episodes.Past(past, anchor), tonight


def by_cell(rule: Any) -> Any:
    """Apply a rule for one cell to all of them."""

    def apply(past: Any, tonight: Any) -> Any:
        return np.array(
            [
                [
                    rule(past.nights[..., c, m], past.anchor[:, c, m], tonight[:, c, m], m == 0)
                    for m in range(LAYOUT.shape[1])
                ]
                for c in range(LAYOUT.shape[0])
            ]
        )

    return apply


def worse_than(value: float, base: float, share: float, throughput: bool) -> int:
    """A throughput below (1 − share) of what it was, a latency above (1 + share) of it."""
    if throughput:
        return int(math.exp(-value) < math.exp(-base) * (1 - share))
    return int(math.exp(value) > math.exp(base) * (1 + share))


def slow_fixed(past, anchor, tonight, throughput):
    return worse_than(tonight[0], anchor[0], 0.05, throughput)


def slow_tensorrt(past, anchor, tonight, throughput):
    daily = past[-90:, 0]
    smooth = [statistics.mean(daily[k : k + 3]) for k in range(88)]
    return worse_than(tonight[0], np.percentile(smooth, 5), 0.05, throughput)


def slow_conbench(past, anchor, tonight, throughput):
    best = past.min(axis=1)
    jumps = np.diff(best)
    low, high = np.quantile(jumps, (0.05, 0.95))
    ordinary = [j for j in jumps if low <= j <= high]
    center, sd = statistics.mean(ordinary), statistics.stdev(ordinary)
    far = [abs(j - center) > 5 * sd for j in jumps]
    kept = [b for k, b in enumerate(best) if not (0 < k < 99 and far[k - 1] and far[k])]
    residuals = [0.0] + [kept[k] - statistics.mean(kept[:k]) for k in range(1, len(kept))]
    z = (min(tonight[:3]) - statistics.mean(kept)) / statistics.stdev(residuals)
    return int(z > 5) - int(z < -5)


def slow_benchstat(past, anchor, tonight, throughput):
    p = stats.mannwhitneyu(tonight, anchor, method="exact").pvalue
    return int(np.sign(np.median(tonight) - np.median(anchor))) if p < 0.05 else 0


def slow_rustc(past, anchor, tonight, throughput):
    series = [*past[-31:, 0], tonight[0]]
    changes = [math.expm1(b - a) for a, b in itertools.pairwise(series)]
    low, high = np.percentile(np.abs(changes[:-1]), (25, 75))
    return int(np.sign(changes[-1])) if abs(changes[-1]) >= high + 3 * (high - low) else 0


def slow_sglang(past, anchor, tonight, throughput):
    # One assertion; the case's other ones are in the test below.
    constant = statistics.median(past[:10, 0])
    return worse_than(tonight[1], constant, 0.05, throughput)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("fixed_5pct", slow_fixed),
        ("tensorrt_llm_post_merge", slow_tensorrt),
        ("conbench_z5", slow_conbench),
        ("benchstat_u05", slow_benchstat),
        ("rustc_perf_iqr", slow_rustc),
    ],
)
def test_a_rule_says_what_it_says_written_slowly(name, slow, seed):
    past, tonight = made_up(seed)
    said = bench.peers.PEERS[name].rule(past, tonight, LAYOUT)
    assert np.array_equal(said, by_cell(slow)(past, tonight))
    assert (said > 0).any()
    assert (said <= 0).any()


def test_five_percent_is_less_of_a_throughput_than_of_a_latency():
    past = bench.episodes.Past(np.zeros((100, 3, *LAYOUT.shape)), np.zeros((10, *LAYOUT.shape)))
    for slower, metrics in ((0.0487, 0), (0.0489, 3), (0.0512, 3), (0.0514, 4)):
        said = bench.peers.Fixed(0.05)(past, np.full((1, *LAYOUT.shape), slower), LAYOUT)
        assert said.sum(axis=1).tolist() == [metrics] * len(LAYOUT.cases)
        assert said[:, 0].any() == (metrics == 4)


def test_sglang_asks_again_only_for_a_case_that_failed_and_believes_the_second_try():
    past, _ = made_up(0, spread=0.0)
    tonight = np.zeros((10, *LAYOUT.shape))
    tonight[0, 0, 1] = tonight[1, 0, 2] = 0.2  # failed on one metric, then on another
    tonight[0, 1] = 0.2  # failed once
    tonight[1, 2] = 0.2  # would fail, if it were asked
    tonight[:2, 3, :3] = 0.2  # fails both times
    tonight[0, 4, 3] = 0.2  # on a metric that is not looked at
    peer = bench.peers.PEERS["sglang_constant"]
    said = np.argwhere(peer.rule(past, tonight, LAYOUT))
    assert {tuple(cell) for cell in said.tolist()} == {(0, 2), (3, 0), (3, 1), (3, 2)}
    assert peer.used(past, tonight, LAYOUT) == 1 + 3 / 8


def test_a_window_that_rolls_forgets_and_an_anchor_does_not():
    lasting = replace(INJECTIONS["10%"], lasts=10)
    rolling = bench.peers.PEERS["rustc_perf_iqr"].run(SILENT, lasting, 1, 1)
    anchored = bench.peers.PEERS["fixed_5pct"].run(SILENT, lasting, 1, 1)
    assert [night.alarm for night in rolling] == [True] + [False] * 9
    assert [night.alarm for night in anchored] == [True] * 10


def test_a_detector_sees_its_own_metrics_only():
    (plain, watching) = (
        bench.peers.PEERS[name].run(SILENT, INJECTIONS["tail"], 1, 3)
        for name in ("fixed_10pct", "fixed_10pct_and_p99")
    )
    assert not any(night.alarm for night in plain)
    named = {cell.split()[1] for night in watching for cell in night.cells}
    assert named == {"ttft_p99"}
    assert sum(plain[0].verdicts.values()) == 24


@pytest.mark.parametrize("name", ["workload", "driver_slower", "failures"])
def test_a_rule_is_not_asked_what_it_cannot_know(name):
    for detector in (*bench.peers.PEERS.values(), bench.real_tools.PytestBenchmark()):
        assert detector.run(SILENT, INJECTIONS[name], 1, 2) == []


def test_an_episode_is_what_the_series_gives():
    injection = INJECTIONS["drift"]
    series = PRESETS["fleet"].series((3, 1), injection)
    drawn = list(bench.episodes.episode(PRESETS["fleet"], injection, 3, 1, 10))
    assert len(drawn) == injection.lasts
    for night, (past, tonight) in enumerate(drawn):
        assert np.allclose(tonight, values(series, night, "c" * 10))
        assert np.allclose(past.nights[-1], values(series, night - 1, "ccc"))
        assert past.nights.shape == (100, 3, *LAYOUT.shape)


# The pilot's rates per cell, of simplified rules on the same noise: A/A, 2 %, 5 %, 10 %. For
# benchstat and rustc-perf it took all trials of a night from one launch, or their median, which is
# not what is done here: with its own sampling the noise model gives .412 / .648 / .895 / – and
# .015 / .023 / .076 / .367, with fresh launches, one a night, what stands here.
PILOT = {
    "fixed_5pct": (0.090, 0.208, 0.503, 0.887),
    "fixed_10pct": (0.025, 0.040, 0.104, 0.490),
    "tensorrt_llm_post_merge": (0.124, 0.369, 0.804, 0.998),
    "tensorrt_llm_pre_merge": (0.017, 0.028, 0.132, 0.796),
    "conbench_z5": (0.012, 0.015, 0.016, 0.129),
    "rustc_perf_iqr": (0.023, 0.031, 0.071, 0.301),
    "benchstat_u05": (0.365, 0.628, 0.888, 0.979),
}


def test_the_rates_per_cell_are_those_of_the_pilot():
    episodes, chunk = 240, 40
    for first in range(0, episodes, chunk):
        for name, sizes in PILOT.items():
            for size in sizes_of(sizes):
                counts = tallied(name, size, first, chunk)
                FOUND[name, size] = FOUND.get((name, size), bench.scores.Tally()) + counts
    for name, wanted in PILOT.items():
        for size, want in zip(sizes_of(wanted), wanted, strict=True):
            counts = FOUND[name, size]
            # The 24 cells of a night share its luck: it counts once.
            slack = 0.015 + 3 * math.sqrt(want * (1 - want) / episodes)
            assert counts.cells / counts.gated == pytest.approx(want, abs=slack), (name, size)


FOUND: dict[tuple[str, str], Any] = {}


def sizes_of(wanted: Any) -> tuple[str, ...]:
    """The injections that a row of the pilot's is of."""
    return ("none", "2%", "5%", "10%")[: len(wanted)]


def tallied(name: str, size: str, seed: int, episodes: int) -> Any:
    """Count a chunk, on the first nights alone."""
    once = replace(INJECTIONS[size], lasts=1)
    outcomes = bench.peers.PEERS[name].run(PRESETS["shared"], once, 50 + seed, episodes)
    return bench.scores.tally(outcomes, once, LAYOUT)


# Tools that are run as they are


def test_pytest_benchmark_itself_decides():
    last = {"same": [1.0, 1.0, 1.0], "slower": [1.0, 2.0, 1.0], "little": [2.0], "faster": [3.0]}
    now = {"same": [1.0, 1.0, 9.0], "slower": [1.06, 1.0, 1.07], "little": [2.08], "faster": [1.0]}
    tool = bench.real_tools.PytestBenchmark()
    assert tool.failing(last, now) == {"slower"}
    assert tool.failing(last, last) == frozenset()


def test_pytest_benchmark_as_a_detector():
    tool = bench.real_tools.PytestBenchmark()
    outcomes = tool.run(SILENT, INJECTIONS["10%"], 1, 2)
    assert [(o.episode, o.night) for o in outcomes] == [(e, n) for e in (0, 1) for n in (0, 1, 2)]
    # Compared with the last file: a slowdown is forgotten the next night.
    assert [len(o.cells) for o in outcomes] == [24, 0, 0, 24, 0, 0]
    assert [len(o.cells) for o in tool.run(SILENT, INJECTIONS["none"], 1, 2)] == [0, 0]


def test_a_tool_that_is_not_installed_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    with pytest.raises(bench.detector.NotAvailable, match="not installed"):
        bench.real_tools.Otava().run(SILENT, INJECTIONS["none"], 1, 1)


def test_otava_itself_decides():
    if not bench.real_tools.otava_made():
        pytest.skip("Otava is not installed: .venv/bin/python bench/detectors --install")
    tool = bench.real_tools.Otava()
    slower = tool.run(PRESETS["dedicated"], INJECTIONS["10%"], 1, 3)
    assert all(any(o.alarm for o in slower if o.episode == e) for e in range(3))
    better = tool.run(PRESETS["dedicated"], INJECTIONS["improvement"], 1, 2)
    assert any(o.faster for o in better)
    assert not any(o.alarm for o in better)


def test_only_a_new_change_point_alarms():
    tool = bench.real_tools.Otava()
    old, moved, other = [(30, 0.1)], [(31, 0.1)], [(31, -0.1)]
    for yesterday, today, sign in (
        ({}, old, 1),
        (old, old, 0),
        (old, moved, 0),
        (old, other, -1),
        (old, [*old, (58, 0.2)], 1),
    ):
        signs = tool.new({(0, 0): yesterday} if yesterday else {}, {(0, 0): today}, LAYOUT)
        assert signs[0, 0] == sign
        assert np.abs(signs).sum() == abs(sign)
