"""bench/engines: a night is read into right ratios, goals are held to the lower end."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import engines.goals
import engines.ratios
import engines.rows
import engines.table
import engines.weights
import pytest
from engines.rows import Machine, rows
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as distributions

from headway import metrics
from headway.core import Case
from headway.engines.models import synthetic
from headway.results import Results

LAUNCHES = st.dictionaries(st.integers(1, 9), st.floats(0.1, 1e4), min_size=2, max_size=6)
# What sending takes, which is as long whatever the engine: a thousandth of these requests.
SEND = 1e-3
RATIOS = ("ratio_to_vllm", "ratio_to_vllm_32", "ratio_to_hf_naive", "ratio_to_before")
RATIOS += ("bandwidth_share",)


# Ratios


@given(LAUNCHES, st.floats(0.01, 100))
def test_what_a_launch_does_to_both_falls_out_of_their_ratio(theirs, factor):
    mine = {launch: factor * value for launch, value in theirs.items()}
    found = engines.ratios.ratio(mine, theirs)
    assert found.n == len(theirs)
    assert found.value == pytest.approx(factor)
    assert found.low < found.value < found.high
    # It is as narrow as an interval may be, however far apart the launches lie.
    assert found.high / found.low < 1.02


@given(LAUNCHES)
def test_the_interval_is_students(values):
    found = engines.ratios.interval(list(values.values()))
    logs = [math.log(value) for value in values.values()]
    mean, sd = statistics.fmean(logs), max(statistics.stdev(logs), 5e-4)
    low, high = distributions.t.interval(0.95, len(logs) - 1, mean, sd / math.sqrt(len(logs)))
    assert math.log(found.low) == pytest.approx(low, abs=1e-9)
    assert math.log(found.high) == pytest.approx(high, abs=1e-9)


@given(LAUNCHES, LAUNCHES)
def test_turned_around_a_ratio_is_its_inverse(mine, theirs):
    one, other = engines.ratios.ratio(mine, theirs), engines.ratios.ratio(theirs, mine)
    shared = mine.keys() & theirs.keys()
    if not shared:
        assert one is None
        assert other is None
        return
    assert one.n == other.n == len(shared)
    assert one.value * other.value == pytest.approx(1)
    if one.n > 1:
        assert one.low * other.high == pytest.approx(1)


def test_one_launch_has_no_interval_and_none_has_no_ratio():
    alone = engines.ratios.ratio({1: 4.0, 2: 9.0}, {1: 2.0, 3: 1.0})
    assert alone == engines.ratios.Interval(pytest.approx(2.0), None, None, 1)
    assert engines.ratios.ratio({1: 4.0}, {2: 2.0}) is None


# Bytes of weights: parameters as the models' cards count them, less an embedding that is not read


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("qwen2.5_1.5b", 1_543_714_304),
        ("qwen2.5_7b", 7_615_616_512 - 152_064 * 3584),
        ("llama3_8b", 8_030_261_248 - 128_256 * 4096),
    ],
)
def test_the_bytes_of_a_step_are_those_of_the_weights(shape, parameters):
    config = synthetic.configuration(synthetic.SHAPES[shape])
    assert engines.weights.step_bytes(config, "bfloat16") == 2 * parameters
    assert engines.weights.step_bytes(config, "float32") == 4 * parameters


def test_of_a_model_that_is_not_known_no_bytes_are_made_up():
    assert engines.weights.step_bytes({"model_type": "mamba"}, "bfloat16") is None


# Rows


def night(factory: ModuleType, names: Mapping[str, Any], **changes: Any) -> Results:
    levels = [factory.level(concurrency) for concurrency in (1, 4, 16)]
    made = factory.make_suite(tuple(names), levels, launches=3)
    return factory.make_night(names, suite=made, **changes)


def row(found: list[dict[str, Any]], engine: str, concurrency: int) -> dict[str, Any]:
    (one,) = [r for r in found if (r["engine"], r["concurrency"]) == (engine, concurrency)]
    return one


def without(results: Results, engine: str, *levels: str) -> Results:
    """Return a night in which an engine was not measured at some levels."""
    gone = {f"{engine}-w32_16-{level}" for level in levels}
    return dataclasses.replace(
        results,
        runs=tuple(run for run in results.runs if run.case.name not in gone),
        expected=tuple(cell for cell in results.expected if cell[2] not in gone),
    )


@given(slower=st.floats(0.0, 4.0), spread=st.floats(0.0, 0.2), seed=st.integers(0, 99))
def test_a_night_in_closed_form_gives_its_ratios(factory, slower, spread, seed):
    names = {"hf_naive": factory.Speed(slower=slower), "graphs": factory.Speed()}
    found = rows(night(factory, names, spread=spread, seed=seed), Machine())
    for concurrency in (1, 4, 16):
        ours = row(found, "graphs", concurrency)
        assert ours["n"] == 3
        low, high = (ours[f"ratio_to_hf_naive{end}"] for end in ("_low", "_high"))
        assert low < ours["ratio_to_hf_naive"] < high
        if not spread:
            assert ours["ratio_to_hf_naive"] == pytest.approx(1 + slower, rel=SEND)
        assert row(found, "hf_naive", concurrency)["ratio_to_hf_naive"] == pytest.approx(1)


def test_the_figures_are_those_of_the_metrics(factory):
    results = night(factory, {"graphs": factory.Speed()}, spread=0.1)
    case = Case("graphs", "fake", "w32_16", "c4")
    found = row(rows(results, Machine()), "graphs", 4)
    for key, name in (("output_tokens_per_s", "output_throughput"), ("tpot_p50_s", "tpot_p50")):
        values = sorted(s.value for s in results.samples(case, metrics.ALL[name]))
        assert found[key] == values[1]


def test_vllms_faster_arm_counts_and_the_equal_one_never(factory):
    names = {
        "graphs": factory.Speed(),
        "vllm": factory.Speed(slower=1.0),
        "vllm_eager": factory.Speed(slower=0.5),
        "vllm_32": factory.Speed(slower=0.25),
    }
    ours = row(rows(night(factory, names), Machine()), "graphs", 4)
    assert ours["vllm"] == "vllm_eager"
    assert ours["ratio_to_vllm"] == pytest.approx(1.5, rel=SEND)
    assert ours["ratio_to_vllm_32"] == pytest.approx(1.25, rel=SEND)


def test_a_rung_is_held_against_the_one_below_it_that_was_measured(factory):
    names = {
        "graphs": factory.Speed(),
        "hf_naive": factory.Speed(),
        "paged": factory.Speed(slower=2.0),
        "fused32": factory.Speed(slower=0.5),
    }
    found = rows(night(factory, names), Machine())
    below = {name: row(found, name, 4)["before"] for name in names}
    assert below == {"graphs": "fused32", "fused32": "paged", "paged": None, "hf_naive": None}
    assert row(found, "fused32", 4)["ratio_to_before"] == pytest.approx(2.0, rel=SEND)
    assert row(found, "graphs", 4)["ratio_to_before"] == pytest.approx(1.5, rel=SEND)


def test_what_is_not_there_is_none_and_never_0(factory):
    results = night(factory, {"graphs": factory.Speed()})
    found = rows(results, Machine(), ("graphs", "vllm", "hf_naive"))
    ours, absent = row(found, "graphs", 1), row(found, "vllm", 1)
    assert ours["output_tokens_per_s"] > 0
    assert all(ours[key] is None and ours[f"{key}_n"] == 0 for key in RATIOS)
    for key in ("output_tokens_per_s", "tpot_p50_s", "outputs_right", "most_running", *RATIOS):
        assert absent[key] is None, key
    assert absent["problems"] == ["left out: the suite has no such engine"]
    text = engines.table.render(found, {}, engines.goals.goals(found, "cpu"))
    (line,) = [one for one in text.splitlines() if re.match(r"\s+1\s+vllm ", one)]
    assert re.findall(r"\d+", line) == ["1", "0"]  # in flight, and how many launches
    json.dumps(found, allow_nan=False)


def test_an_engine_that_is_left_out_says_why(factory):
    results = night(factory, {"graphs": factory.Speed()})
    left = dataclasses.replace(results.suite, left_out={"vllm": "no wheel for this platform"})
    found = rows(dataclasses.replace(results, suite=left), Machine())
    assert row(found, "vllm", 1)["problems"] == ["left out: no wheel for this platform"]


def test_a_launch_that_cannot_be_judged_counts_for_nobody(factory):
    names = {"hf_naive": factory.Speed(slower=1.0), "graphs": factory.Speed()}
    results = night(factory, names)
    runs = tuple(
        dataclasses.replace(run, invalid=("the machine moved",), span_s=1e9, records=())
        if (run.case.instance, run.launch) == ("hf_naive", 2)
        else run
        for run in results.runs
    )
    found = rows(dataclasses.replace(results, runs=runs), Machine())
    ours, naive = row(found, "graphs", 4), row(found, "hf_naive", 4)
    assert (ours["n"], naive["n"], ours["ratio_to_hf_naive_n"]) == (3, 2, 2)
    assert ours["ratio_to_hf_naive"] == pytest.approx(2.0, rel=SEND)
    assert naive["problems"] == ["launch 2: the machine moved"]


def test_a_lower_level_of_hf_naive_stands_for_a_higher_one(factory):
    names = {"hf_naive": factory.Speed(slower=1.0), "graphs": factory.Speed()}
    results = without(night(factory, names), "hf_naive", "c16")
    found = rows(results, Machine())
    ours, below = row(found, "graphs", 16), row(found, "hf_naive", 4)
    assert ours["hf_naive_level"] == "c4"
    wanted = ours["output_tokens_per_s"] / below["output_tokens_per_s"]
    assert ours["ratio_to_hf_naive"] == pytest.approx(wanted)
    assert row(found, "hf_naive", 16)["output_tokens_per_s"] is None
    assert "by its c4" in engines.table.render(found, {}, ())
    # One request in flight is not what a queue of them is.
    alone = rows(without(results, "hf_naive", "c4"), Machine())
    assert row(alone, "graphs", 16)["ratio_to_hf_naive"] is None


def test_the_share_of_the_bandwidth_is_that_of_one_request_in_flight(factory):
    speed = factory.Speed(itl_s=0.010)
    found = rows(night(factory, {"graphs": speed}), Machine(200_000_000, 40e9))
    assert row(found, "graphs", 1)["bandwidth_share"] == pytest.approx(0.5)
    assert row(found, "graphs", 4)["bandwidth_share"] is None
    assert row(found, "graphs", 1)["problems"] == []
    beyond = rows(night(factory, {"graphs": speed}), Machine(500_000_000, 40e9))
    assert "at 1.25 of the bandwidth that was measured" in row(beyond, "graphs", 1)["problems"][0]


def test_waste_is_what_is_held_and_not_filled(factory):
    results = night(factory, {"graphs": factory.Speed()})
    assert row(rows(results, Machine()), "graphs", 4)["kv_waste"] is None
    runs = tuple(
        dataclasses.replace(run, engine={**run.engine, "server_kv_filled": 0.96})
        for run in results.runs
    )
    found = rows(dataclasses.replace(results, runs=runs), Machine())
    assert row(found, "graphs", 4)["kv_waste"] == pytest.approx(0.04)
    assert "4 %" in engines.table.render(found, {}, ())


def test_outputs_are_counted_once_they_were_verified(factory):
    results = night(factory, {"graphs": factory.Speed()})
    right = row(rows(results, Machine()), "graphs", 4)
    assert (right["outputs_right"], right["outputs_wrong"]) == (48, 0)
    spoilt = rows(factory.verified(results, first_wrong=2), Machine())
    assert sum(one["outputs_wrong"] or 0 for one in spoilt) > 0
    unknown = row(rows(dataclasses.replace(results, verifications={}), Machine()), "graphs", 4)
    assert (unknown["outputs_right"], unknown["outputs_wrong"]) == (None, None)


# Goals


def told(**figures: float | None) -> dict[str, Any]:
    keys = [f"{key}{end}" for key in RATIOS for end in ("", "_low", "_high", "_n")]
    place = {"engine": "graphs", "workload": "w128_64", "concurrency": 8}
    return dict.fromkeys(keys) | place | figures


@pytest.mark.parametrize(
    ("value", "low", "met"),
    [(6.5, 6.0, True), (6.5, 5.99, False), (6.5, None, None), (None, None, None)],
)
def test_the_lower_end_of_an_interval_counts(value, low, met):
    found = [told(ratio_to_hf_naive=value, ratio_to_hf_naive_low=low, ratio_to_hf_naive_n=3)]
    (goal,) = [
        goal
        for goal in engines.goals.goals(found, "cpu")
        if goal.name == "graphs ÷ hf_naive, output tok/s, 8 in flight"
    ]
    assert (goal.value, goal.met) == (value, met)


def test_without_rows_every_goal_is_there_and_nobody_can_tell():
    for device, count in (("cpu", 11), ("cuda", 4)):
        found = engines.goals.goals([], device)
        assert len(found) == count
        assert {goal.met for goal in found} == {None}
    said = engines.table.render([], {}, engines.goals.goals([], "cpu"))
    assert said.count("not measured") == 11


def test_long_code_misses_its_goal(tmp_path):
    assert engines.goals.engine_lines(tmp_path) is None
    (tmp_path / "engine.py").write_text("pass\n" * 1500)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "ops.cpp").write_text(";\n" * 501)
    lines = engines.goals.engine_lines(tmp_path)
    assert lines == 2001
    assert engines.goals.goals([], "cpu", lines)[-1].met is False
    assert engines.goals.goals([], "cpu", 2000)[-1].met is True


def test_where_steps_go_is_shown_and_what_could_not_be_split_is_said():
    split = {"rows": 8, "steps": 9, "wall_s": 0.012, "weights_share": 0.7, "attention_share": None}
    profile = {
        "graphs": {"splits": [split, {"rows": 32, "error": "does not decode 32"}]},
        "paged": {"error": "no such model"},
        "chunked": {},
    }
    text = engines.table.render([], profile, ())
    (line,) = [one for one in text.splitlines() if "12.0" in one]
    assert line.split() == ["8", "graphs", "12.0", "70", "%", "—", "—", "—"]
    for said in ("graphs, 32 rows: does not decode 32", "paged: no split of its steps: no such"):
        assert said in text
    assert "chunked: no split of its steps: it said nothing" in text
