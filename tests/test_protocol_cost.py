"""What HTTP costs: replayed inside by the same definitions, judged where known, told in a line."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import metrics, night, outlook, suite, verdict
from headway.core import Case, Level, Request, RequestRecord, Run, TokenEvent
from headway.night import inside
from headway.report.document import document
from headway.report.markdown import markdown
from headway.report.terminal import terminal
from headway.suite import BaselineGate, Limit, SuiteError

CASE = Case("a", "fake", "w", "c2")
steps = st.floats(0.001, 2.0)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Level, list[Request], list[RequestRecord]]:
    """Draw a closed loop: each of two slots takes the next request when its last one ended."""
    level = Level("c2", draw(st.integers(4, 12)), concurrency=2)
    requests, records, free = [], [], [0.0, 0.0]
    for index in range(level.num_requests):
        gaps = draw(st.lists(steps, min_size=1, max_size=5))
        slot = min((0, 1), key=free.__getitem__)
        due_s = at_s = free[slot]
        events = []
        for gap in gaps:
            at_s += gap
            events.append(TokenEvent(at_s, num_tokens=draw(st.integers(1, 2))))
        free[slot] = at_s
        total = sum(event.num_tokens or 0 for event in events)
        requests.append(Request(index, (1, 2), total))
        record = RequestRecord(index, due_s, due_s, at_s, tuple(events), total)
        records.append(dataclasses.replace(record, completion_tokens=total))
    return level, requests, records


def answer_of(records: list[RequestRecord], start_s: float = 0.0) -> dict[str, Any]:
    """Return what a host would say that stamped the same times."""
    lives = [
        {
            "due_s": start_s + r.due_s,
            "arrived_s": start_s + (r.sent_s or 0.0),
            "departed": [[start_s + e.at_s, e.num_tokens] for e in r.events],
            "ended_s": start_s + (r.ended_s or 0.0),
            "finish_reason": "length",
            "error": None,
        }
        for r in records
    ]
    return {"start_s": start_s, "requests": lives}


@given(runs())
def test_the_same_times_inside_and_outside_are_the_same_figures(
    drawn: tuple[Level, list[Request], list[RequestRecord]],
) -> None:
    level, requests, records = drawn
    found = inside.figures(CASE, level, inside.records(requests, answer_of(records)))
    run = Run(CASE, 1, 1, level, "", 1.0, tuple(records), "", "", engine=found)
    whole = metrics.output_throughput(run)
    assert found.get("inside_output_throughput") == whole
    assert found.get("inside_tpot_p50_s") == metrics.ALL["tpot_p50"].of_run(run)
    assert found.get("inside_ttft_p50_s") == metrics.ALL["ttft_p50"].of_run(run)
    assert metrics.protocol_cost(run) == (None if whole is None else 0.0)
    slower = dataclasses.replace(run, engine={"inside_output_throughput": 1.25 * (whole or 1.0)})
    assert metrics.protocol_cost(slower) == (None if whole is None else pytest.approx(0.2))


def test_times_count_from_the_replay_s_start() -> None:
    request = Request(0, (1,), 1)
    record = RequestRecord(0, 0.25, 0.25, 0.5, (TokenEvent(0.5, num_tokens=1),), 1)
    (found,) = inside.records([request], answer_of([record], start_s=1000.0))
    assert (found.due_s, found.sent_s, found.ended_s) == (0.25, 0.25, 0.5)


@pytest.mark.parametrize(
    "fault", [{"error": "it burns"}, {"departed": []}, {"departed": [[0.1, 1], [0.2, 1]]}]
)
def test_a_replay_in_which_anything_is_wrong_gives_no_figures(fault: dict[str, Any]) -> None:
    level = Level("c1", 2, concurrency=1)
    record = RequestRecord(0, 0.0, 0.0, 0.5, (TokenEvent(0.5, num_tokens=3),), 3)
    answer = answer_of([record, record])
    answer["requests"][1] |= fault
    found = inside.figures(CASE, level, inside.records([Request(0, (1,), 3)] * 2, answer))
    assert found == {"inside_s": 0.5, "inside_failed": 1.0}
    assert inside.figures(CASE, level, ()) == {}


def test_protocol_time_is_what_the_engine_did_not_take(factory: ModuleType) -> None:
    record = factory.record(0, 1.0, factory.Speed())
    # Due 0.1 ms before it was sent, and so before it arrived; each event half a millisecond late.
    assert metrics.protocol_s(record) == pytest.approx(0.0001 + factory.PROTOCOL_S)
    blind = factory.record(0, 1.0, factory.Speed(stamps=False))
    assert metrics.protocol_s(blind) is None


def with_inside(factory: ModuleType, share: float = 0.98, **changes: Any) -> Any:
    """Return a night of which a was replayed inside, a little faster, and b was not."""
    limits = changes.pop("limits", ())
    asked = dataclasses.replace(factory.make_suite(limits=limits), replay_inside=True)
    speeds = {"a": factory.Speed(), "b": factory.Speed(stamps=False)}
    made = factory.make_night(speeds, suite=asked)

    def replayed(run: Run) -> Run:
        if run.case.instance == "b":
            return run
        whole = metrics.output_throughput(run) or 1.0
        figures = {"inside_output_throughput": whole / share, "inside_failed": 0.0, **changes}
        return dataclasses.replace(run, engine={**run.engine, **figures})

    return dataclasses.replace(made, runs=tuple(map(replayed, made.runs)))


def cells(judged: Any, metric: str) -> set[str]:
    return {cell.case.instance for cell in judged if cell.metric == metric}


def test_only_what_an_engine_tells_is_a_cell(factory: ModuleType) -> None:
    judged = factory.judge(with_inside(factory))
    assert cells(judged, "protocol_cost") == cells(judged, "protocol_s_p50") == {"a"}
    found = factory.cell(judged, "a", "protocol_cost")
    assert found.value == pytest.approx(0.02)
    assert found.word == verdict.WATCHED
    assert cells(factory.judge(factory.make_night()), "protocol_cost") == set()


def test_a_limit_on_what_is_not_known_is_not_a_pass(factory: ModuleType) -> None:
    limits = (Limit("protocol_cost", max=0.01), Limit("protocol_s_p50", max=1.0))
    judged = factory.judge(with_inside(factory, limits=limits))
    assert factory.cell(judged, "a", "protocol_cost").verdict == "LIMIT"
    assert factory.cell(judged, "a", "protocol_s_p50").verdict == "PASS"
    assert factory.cell(judged, "b", "protocol_cost").verdict == "MISSING"
    assert factory.cell(judged, "b", "protocol_s_p50").verdict == "MISSING"


def test_a_share_that_is_better_low_is_worse_high(factory: ModuleType) -> None:
    gate, metric = BaselineGate(), metrics.ALL["protocol_cost"]
    said = [
        verdict.against(CASE, metric, [now], [0.02, 0.03], gate).verdict
        for now in (0.01, 0.02, 0.03, 0.04, -0.1)
    ]
    assert said == ["IMPROVEMENT", "PASS", "PASS", "REGRESSION", "IMPROVEMENT"]


def test_the_report_says_it_in_a_line_per_engine(factory: ModuleType) -> None:
    made = with_inside(factory)
    doc = document(made, factory.judge(made), headway_version="1")
    inside_tps = metrics.output_throughput(made.runs[-2]) or 0.0
    for text in (terminal(doc, 200, color=False), markdown(doc)):
        (line,) = [one for one in text.splitlines() if "HTTP costs" in one]
        assert line.startswith("a: HTTP costs, of output throughput, 2.0% at c1 (")
        assert ", 2.0% at c4 (" in line
        assert line.endswith("tok/s without it)")
    assert inside_tps
    plain = factory.make_night()
    doc = document(plain, factory.judge(plain), headway_version="1")
    assert "HTTP" not in terminal(doc, 200, color=False)
    failed = with_inside(factory, inside_failed=1.0)
    doc = document(failed, factory.judge(failed), headway_version="1")
    assert "a: of 4 Runs, 4 could not be replayed without HTTP" in terminal(doc, 200, color=False)


def test_what_engines_of_one_kind_differ_in_is_said(factory: ModuleType) -> None:
    made = factory.make_night({"x8": factory.Speed(), "x32": factory.Speed(version="2")})
    args = {"x8": {"max_num_seqs": 8}, "x32": {"max_num_seqs": 32, "block": 4}}
    instances = [dataclasses.replace(i, args=args[i.name]) for i in made.suite.instances]

    def read_back(record: Any) -> Any:
        settings = {"max_num_seqs": args[record.instance]["max_num_seqs"], "threads": 2}
        info = dataclasses.replace(record.info, settings=settings)
        return dataclasses.replace(record, info=info)

    made = dataclasses.replace(
        made,
        suite=dataclasses.replace(made.suite, instances=tuple(instances)),
        launches=tuple(map(read_back, made.launches)),
    )
    doc = document(made, factory.judge(made), headway_version="1")
    for text in (terminal(doc, 200, color=False), markdown(doc)):
        (line,) = [one for one in text.splitlines() if "x32 against x8" in one]
        assert line == (
            "x32 against x8: args.block: absent → 4, args.max_num_seqs: 8 → 32, version: 1.0 → 2"
        )


SUITE = """
[suite]
model = "fake"
launches = {launches}
idle_timeout_s = 2
calibrate = false
replay_inside = true
[engine.fake_a]
kind = "fake"
args = {{ ttft_s = 0.02, itl_s = 0.005 {fault} }}
[workload.w]
prompt_tokens = 8
output_tokens = 3
{load}
[baseline]
metrics = {gated}
"""


def loaded(tmp_path: Any, **changes: Any) -> suite.Suite:
    values = {"launches": 1, "fault": "", "load": "concurrency = [2]", "gated": "[]", **changes}
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(**values))
    return suite.load(path)


def test_what_is_replayed(tmp_path: Any) -> None:
    def wanted(load: str) -> list[bool]:
        made = loaded(tmp_path, load=load)
        return [inside.wanted(made, case) for case in made.cases()]

    assert wanted("concurrency = [1, 2]\nrate_per_s = [10]") == [True, True, False]
    assert wanted('concurrency = [2]\nturns = 2\nsend = "chat"') == [False]


def test_it_gates_by_a_limit_only(tmp_path: Any) -> None:
    outlook.check(loaded(tmp_path))
    with pytest.raises(SuiteError, match="lies around 0: only a limit can gate on it"):
        outlook.check(loaded(tmp_path, gated='["protocol_cost"]'))


def test_a_night_replays_each_level_inside(workspace: Any) -> None:
    suites = workspace.folder / "suites"
    text = SUITE.format(
        launches=2, fault="", load='concurrency = [1, 2]\nrequests = 8\nsend = "text"', gated="[]"
    )
    (suites / "inside.toml").write_text(text + '[[limit]]\nmetric = "protocol_cost"\nmax = 0.9\n')
    done = workspace.run("run", "inside")
    assert done.code == 0, done.text
    _, results = night.read(done.night)
    assert len({(run.case, run.launch) for run in results.runs}) == 4  # one may be replaced
    for run in results.runs:
        assert run.engine["inside_failed"] == 0
        assert run.engine["inside_s"] > 0
        assert run.engine["inside_output_throughput"] > 0
        cost = metrics.protocol_cost(run)
        assert cost is not None
        assert cost < 0.9
        assert metrics.ALL["protocol_s_p50"].of_run(run) is not None
    assert ("fake_a", "protocol_cost") in done.cells("PASS")
    assert "fake_a: HTTP costs, of output throughput" in done.text


def test_a_limit_on_it_that_is_broken_is_red(workspace: Any) -> None:
    text = SUITE.format(launches=1, fault="", load="concurrency = [1]\nrequests = 8", gated="[]")
    text += '[[limit]]\nmetric = "protocol_cost"\nmax = -1.0\n'
    (workspace.folder / "suites" / "inside.toml").write_text(text)
    done = workspace.run("run", "inside")
    assert done.code == 1, done.text
    (failed,) = done.failed()
    assert failed == "test_gate[fake_a-w-c1:protocol_cost]"


def test_an_engine_that_dies_in_its_replay_fails_like_one_that_dies(workspace: Any) -> None:
    suites = workspace.folder / "suites"
    # 1 for the start, 2 for the warm-up, 8 of the Run; then it is replayed.
    text = SUITE.format(
        launches=1,
        fault=", die_after_requests = 15",
        load="concurrency = [1]\nrequests = 8",
        gated="[]",
    )
    (suites / "inside.toml").write_text(text)
    done = workspace.run("run", "inside")
    assert done.code in (0, 1), done.text
    (record,) = [r for r in done.journal("launch") if r["failure"]]
    assert record["failure_kind"] == "died"
    assert len(done.journal("run")) == 1
    assert done.journal("run")[0]["engine"]["inside_failed"] == 1
