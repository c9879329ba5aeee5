from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from headway.report.compare import compare, render, to_json
from headway.report.document import ReportError, document


def night_report(factory, speeds=None, *, launches=10, night="old", seed=0, **more):
    speeds = speeds or {"a": factory.Speed(), "b": factory.Speed()}
    suite = factory.make_suite(tuple(speeds), launches=launches)
    made = factory.make_night(speeds, suite=suite, night=night, seed=seed, spread=0.003, **more)
    return document(made, factory.judge(made), headway_version="0.1.0")


@pytest.fixture(scope="module")
def written(factory):
    """Return both reports as text: each test reads its own copy."""
    reports = (night_report(factory), night_report(factory, launches=2, night="new", seed=9))
    return [json.dumps(report) for report in reports]


@pytest.fixture
def old(written):
    return json.loads(written[0])


@pytest.fixture
def new(written):
    return json.loads(written[1])


def only(report, *wanted, **edits):
    """Return the report with the cells (instance, metric) of c4 only; `edits` go into each."""
    kept = copy.deepcopy(report)
    kept["cells"] = [
        c | copy.deepcopy(edits)
        for c in kept["cells"]
        if (c["instance"], c["metric"]) in wanted and c["level"] == "c4"
    ]
    assert len(kept["cells"]) == len(wanted)
    return kept


def with_values(report, instance, metric, values, **edits):
    """Return a report of one cell with the given samples."""
    made = only(report, (instance, metric))
    (cell,) = made["cells"]
    cell["samples"] = [
        {"launch": i, "value": v, "reason": None, "valid": True} for i, v in enumerate(values)
    ]
    cell["value"] = values[0]
    cell |= edits
    return made


def joined(*reports):
    """Return one report with the cells of all, in that order."""
    made = copy.deepcopy(reports[0])
    made["cells"] = [c for report in reports for c in copy.deepcopy(report["cells"])]
    return made


def verdicts(comparison):
    return {(r.case.instance, r.metric): r.verdict for r in comparison.rows}


def test_an_unchanged_engine_is_ok(old, new):
    found = compare(old, new)
    assert found.exit_code == 0
    assert not [row.line for row in found.rows if row.counts and row.verdict != "PASS"]
    assert found.compared == len([c for c in old["cells"] if c["metric"] != "greedy_equality"])
    assert found.summary == f"{found.compared} compared, 0 new, 0 missing, 0 not comparable"


def test_a_slower_engine_is_slower_in_throughput_and_in_latency(factory, old):
    slow = {"a": factory.Speed(), "b": factory.Speed(slower=0.12, version="1.1")}
    found = compare(old, night_report(factory, slow, launches=2, night="new", seed=9))
    red = {(r.case.instance, r.metric) for r in found.rows if r.counts and r.verdict != "PASS"}
    assert red == {("b", m) for m in ("output_throughput", "ttft_p50", "tpot_p50")}
    assert found.exit_code == 1
    assert found.changed == {"b": ("version: 1.0 → 1.1",)}
    shown = render(found, 80, color=False)
    assert "changed in b: version: 1.0 → 1.1" in shown
    said = " ".join(shown.split())
    assert "watched, moved as well: b-w32_16-c4: output_throughput_span -1" in said
    assert shown.splitlines()[-1] == "SLOWER (exit code 1)"


def test_a_faster_engine_is_faster(factory, old):
    fast = {"a": factory.Speed(), "b": factory.Speed(slower=-0.3)}
    found = compare(old, night_report(factory, fast, launches=2, night="new"))
    assert verdicts(found)["b", "output_throughput"] == "IMPROVEMENT"
    assert verdicts(found)["b", "ttft_p50"] == "IMPROVEMENT"
    assert found.exit_code == 0


def test_case_24_cells_are_joined_by_key_never_by_position(old):
    m1, m2 = ("a", "output_throughput"), ("b", "output_throughput")
    before = joined(with_values(old, *m1, [100.0, 100.0]), with_values(old, *m2, [50.0, 50.0]))
    after = joined(with_values(old, *m2, [49.0, 49.0]), with_values(old, *m1, [101.0, 101.0]))
    found = compare(before, after)
    changes = {row.case.instance: row.change for row in found.rows}
    assert changes == {"a": pytest.approx(0.01), "b": pytest.approx(-0.02)}
    assert set(verdicts(found).values()) == {"PASS"}
    assert found.exit_code == 0


def test_case_24_a_key_twice_in_one_file_is_an_error(old, new):
    twice = joined(only(old, ("a", "ttft_p50")), only(old, ("a", "ttft_p50")))
    with pytest.raises(ReportError, match="OLD holds the cell a-w32_16-c4 ttft_p50 twice"):
        compare(twice, new)
    with pytest.raises(ReportError, match="NEW holds the cell"):
        compare(new, twice)


@pytest.mark.parametrize(
    ("metric", "factor", "expected"),
    [
        ("output_throughput", 0.9, "REGRESSION"),
        ("output_throughput", 1.1, "IMPROVEMENT"),
        ("ttft_p50", 1.1, "REGRESSION"),
        ("ttft_p50", 0.9, "IMPROVEMENT"),
    ],
)
def test_case_24_the_sign_follows_the_direction(old, metric, factor, expected):
    before = with_values(old, "a", metric, [10.0, 10.0])
    after = with_values(old, "a", metric, [10.0 * factor])
    (row,) = compare(before, after).rows
    assert row.verdict == expected
    assert (row.worse_by > 0) == (expected == "REGRESSION")


@pytest.mark.parametrize("zero", [0.0, -0.001])
def test_case_25_a_latency_of_zero_in_old_is_an_invalid_baseline(old, zero):
    before = with_values(old, "a", "ttft_p50", [zero, 0.1])
    found = compare(before, with_values(old, "a", "ttft_p50", [0.085]))
    (row,) = found.rows
    assert row.verdict == "INCOMPATIBLE"
    assert "invalid baseline" in row.reason
    assert "record it again" in row.reason
    assert found.exit_code == 1
    assert "inf" not in json.dumps(to_json(found), allow_nan=False)


@pytest.mark.parametrize("launches", [1, 2])
def test_case_25_failures_from_none_to_three_show_as_success_rate(factory, launches):
    speeds = {"a": factory.Speed(fails=3), "b": factory.Speed()}
    before = night_report(factory, launches=launches)
    after = night_report(factory, speeds, launches=1, night="new")
    found = compare(before, after)
    rows = {(r.case.name, r.metric): r for r in found.rows}
    assert rows["a-w32_16-c4", "success_rate"].verdict == "REGRESSION"
    assert rows["b-w32_16-c4", "success_rate"].verdict != "REGRESSION"
    # The survivors' latencies are no measurement of the engine.
    assert rows["a-w32_16-c4", "ttft_p50"].verdict == "LIMIT"
    assert found.exit_code == 1


def test_case_26_no_common_cell_is_not_a_pass_and_names_the_likely_rename(factory, old):
    speeds = {"a2": factory.Speed(), "b2": factory.Speed()}
    found = compare(old, night_report(factory, speeds, night="new"))
    assert found.compared == 0
    assert len(found.new) == len(found.missing) == len(old["cells"])
    assert found.exit_code == 1
    assert "a-w32_16-c4 is missing and a2-w32_16-c4 is new: was it renamed?" in found.notes
    shown = render(found, 80, color=False)
    assert f"0 compared, {len(found.new)} new, {len(found.missing)} missing" in shown
    assert shown.splitlines()[-1].startswith("CAN'T COMPARE")


def test_case_26_what_is_missing_fails_and_what_is_new_does_not(factory, old):
    a, b, c = (("a", "ttft_p50"), ("b", "ttft_p50"), ("b", "tpot_p50"))
    before, after = only(old, a, b), only(old, b, c)
    found = compare(before, after)
    assert verdicts(found) == {a: "MISSING", b: "PASS"}
    assert (found.compared, found.new) == (1, ("b-w32_16-c4 tpot_p50",))
    assert found.missing == ("a-w32_16-c4 ttft_p50",)
    assert found.exit_code == 1
    assert compare(only(old, b), after).exit_code == 0


def test_case_26_two_empty_reports_are_not_a_pass(old):
    found = compare(only(old), only(old))
    assert found.exit_code == 3
    assert found.summary.startswith("0 compared, 0 new, 0 missing")


def test_case_27_milliseconds_and_seconds_are_brought_together(old):
    before = with_values(old, "a", "ttft_p50", [850.0, 850.0], unit="ms")
    found = compare(before, with_values(old, "a", "ttft_p50", [0.9, 0.9]))
    (row,) = found.rows
    assert row.verdict == "REGRESSION"
    assert row.change == pytest.approx(0.0588, abs=1e-4)
    assert (row.old, row.new, row.unit) == (pytest.approx(0.85), 0.9, "s")
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"unit": None}, "has no unit"),
        ({"unit": "fortnights"}, "has unit 'fortnights'; allowed: s, "),
        ({"unit": "tokens/s"}, r"is in tokens/s .* in OLD and in s"),
        ({"direction": "higher"}, "higher is better"),
        ({"direction": None}, "has no unit or direction"),
    ],
)
def test_case_27_a_missing_unknown_or_other_unit_is_an_error(old, edits, message):
    before = with_values(old, "a", "ttft_p50", [0.8, 0.8], **edits)
    after = with_values(old, "a", "ttft_p50", [0.9])
    with pytest.raises(ReportError, match=message) as caught:
        compare(before, after)
    assert "\n" not in str(caught.value)
    with pytest.raises(ReportError):
        compare(after, before)


@pytest.mark.parametrize("factor", [0.001, 1000.0])
def test_case_27_a_change_beyond_tenfold_is_suspicious_even_as_an_improvement(old, factor):
    before = with_values(old, "a", "ttft_p50", [0.85, 0.85])
    (row,) = compare(before, with_values(old, "a", "ttft_p50", [0.85 * factor])).rows
    assert row.verdict == "INCOMPATIBLE"
    assert "wrong unit" in row.reason


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"device": "H200"}, "device: Test CPU x2 → H200"),
        ({"revision": "r2"}, "revision: r1 → r2"),
    ],
)
def test_another_identity_is_incompatible_with_the_facts_side_by_side(factory, old, change, shown):
    found = compare(old, night_report(factory, night="new", **change))
    assert found.compared == 0
    assert {row.verdict for row in found.rows} == {"INCOMPATIBLE"}
    assert all(shown in row.reason for row in found.rows)
    (difference,) = found.rows[0].differences
    assert f"{difference.field}: {difference.old} → {difference.new}" == shown
    assert found.exit_code == 1
    assert shown in render(found, 80, color=False)


@pytest.mark.parametrize("field", ["dtype", "metric_version", "workload"])
def test_each_part_of_the_identity_counts(old, new, field):
    for case in new["cases"]:
        case["identity"][field] = "another"
    assert {row.verdict for row in compare(old, new).rows} == {"INCOMPATIBLE"}


def test_another_machine_around_the_device_is_printed_and_blocks_nothing(old, new):
    new["machine"]["gpu_driver"] = "999"
    found = compare(old, new)
    assert found.environment == ("gpu_driver: none → 999",)
    assert found.exit_code == 0
    assert "the machine changed: gpu_driver: none → 999" in render(found, 80, color=False)


def test_one_launch_in_old_cannot_judge(factory, new):
    found = compare(night_report(factory, launches=1), new)
    rows = [row for row in found.rows if row.metric != "greedy_equality"]
    assert {row.verdict for row in rows} == {"INCONCLUSIVE"}
    assert all("OLD has one launch" in row.reason for row in rows)
    assert (found.compared, found.exit_code) == (0, 3)


def test_strict_does_not_pass_what_cannot_be_told(factory, new):
    noisy = night_report(factory)
    for cell in noisy["cells"]:
        for sample in cell["samples"]:
            if sample["value"] is not None and cell["unit"] != "1":
                sample["value"] *= 1 + 0.5 * (sample["launch"] % 2)
    found = compare(noisy, new)
    assert "INCONCLUSIVE" in verdicts(found).values()
    assert (found.exit_code, compare(noisy, new, strict=True).exit_code) == (0, 3)


def test_wrong_outputs_fail_whatever_the_speed(factory, old):
    made = factory.verified(factory.make_night(night="new"), first_wrong=1)
    wrong = document(made, factory.judge(made), headway_version="0.1.0")
    found = compare(old, wrong)
    assert "WRONG" in verdicts(found).values()
    assert found.exit_code == 1
    assert any("outputs of OLD were wrong" in note for note in compare(wrong, old).notes)


def test_an_invalid_run_in_new_cannot_be_told(factory, old):
    made = factory.make_night(night="new")
    runs = tuple(dataclasses.replace(run, invalid=("it slept",)) for run in made.runs)
    made = dataclasses.replace(made, runs=runs)
    found = compare(old, document(made, factory.judge(made), headway_version="0.1.0"))
    rows = {row.metric: row for row in found.rows if row.case.name == "b-w32_16-c4"}
    assert rows["ttft_p50"].verdict == "INVALID"
    assert "it slept" in rows["ttft_p50"].reason
    assert found.exit_code == 3


def test_a_value_that_only_old_lacks_cannot_be_compared(old):
    before = with_values(old, "a", "ttft_p50", [0.1, 0.1], value=None)
    (row,) = compare(before, with_values(old, "a", "ttft_p50", [0.1])).rows
    assert row.verdict == "MISSING"
    assert row.reason.startswith("OLD: ")


def test_a_watched_metric_moves_without_failing(old):
    before = with_values(old, "a", "ttft_p99", [0.1, 0.1])
    after = with_values(old, "a", "ttft_p99", [0.2])
    found = compare(before, after)
    assert verdicts(found) == {("a", "ttft_p99"): "REGRESSION"}
    assert not found.rows[0].gated
    assert found.exit_code == 3  # No metric that gates is in these reports.
    after["suite"]["gates"] = ["ttft_p99"]
    assert compare(before, after).exit_code == 1


def test_a_wider_tolerance_in_new_hides_nothing(old):
    before = with_values(old, "a", "ttft_p50", [0.1, 0.1])
    after = with_values(old, "a", "ttft_p50", [0.11])
    after["suite"]["tolerance"] = 0.5
    assert compare(before, after).exit_code == 1


def test_a_report_with_itself_says_so(old):
    assert "OLD and NEW are the same night" in compare(old, old).notes


@pytest.mark.parametrize("width", [80, 120])
def test_the_rendering_keeps_its_width_and_has_no_markup(factory, old, width):
    hostile = json.loads(json.dumps(old).replace('"a"', json.dumps("[red]|x\x1b[31m" * 12)))
    shown = render(compare(hostile, hostile), width, color=False)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "\x1b" not in shown
    assert "[red]|x" in shown


def test_the_json_holds_counts_rows_and_the_exit_code(old, new):
    made = json.loads(json.dumps(to_json(compare(old, new)), allow_nan=False))
    assert made["format"] == "headway comparison"
    assert made["exit_code"] == 0
    assert made["counts"] == {"compared": made["counts"]["compared"], "new": 0, "missing": 0}
    assert len(made["rows"]) == len(old["cells"])
    assert {"verdict", "old", "new", "worse_by", "unit"} <= set(made["rows"][0])


def test_what_is_no_report_is_refused(old):
    with pytest.raises(ReportError, match="NEW does not fit the schema of a report"):
        compare(old, {"schema": 1})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([0.0, 0.0], [0.0, 0.0], "PASS"),
        ([0.0, 0.0], [3.0, 3.0], "INCONCLUSIVE"),
        ([0.0, 3.0], [3.0, 3.0], "INCONCLUSIVE"),
        ([3.0, 3.0], [0.0, 0.0], "REGRESSION"),
        ([3.0, 3.0], [3.0, 3.0], "PASS"),
    ],
)
def test_a_rate_of_zero_is_a_value(old, before, after, expected):
    a, b = (with_values(old, "a", "request_throughput", values) for values in (before, after))
    found = compare(a, b)
    assert [row.verdict for row in found.rows] == [expected]
    json.dumps(to_json(found), allow_nan=False)
    b["suite"]["gates"] = ["request_throughput"]
    assert (compare(a, b).exit_code == 1) == (expected == "REGRESSION")
