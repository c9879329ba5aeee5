"""A night in progress, in this process, on fake engines: replacement, budget, resume."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway import arrivals, available, night, outlook, suite, validity, verdict
from headway.night import Night
from headway.night.session import read_commit
from headway.report.document import document
from headway.transport import Target
from headway.workload import lengths_of

SUITE = """
[suite]
model = "fake"
launches = 1
idle_timeout_s = 2
calibrate = false
[engine.fake_a]
kind = "fake"
args = {{ ttft_s = 0.03, itl_s = 0.005 }}
[workload.w]
prompt_tokens = 8
output_tokens = 3
{load}
[baseline]
metrics = []
"""
Begin = Callable[..., Night]


@pytest.fixture
def begin(tmp_path: Path, night_of: Begin) -> Begin:
    """Begin a night over a small suite in a folder of its own."""

    def make(load: str = "concurrency = [1, 2]\nrequests = 8", **changes: Any) -> Night:
        path = tmp_path / "tiny.toml"
        path.write_text(changes.pop("text", SUITE).format(load=load))
        return night_of(suite.load(path, changes.pop("overrides", ())), **changes)

    return make


def measured(made: Night) -> list[tuple[str, int, bool]]:
    return [(run.case.level, run.attempt, bool(run.invalid)) for run in made.results.runs]


def measure(made: Night) -> None:
    made.expect(made.suite.cases())
    night.measure_all(made, made.cases)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (0, [("c1", 1, False), ("c2", 1, False)]),
        (1, [("c1", 1, True), ("c2", 1, False), ("c1", 2, False)]),
        # At most two replacements; then it stays invalid, and the night goes on.
        (9, [("c1", 1, True), ("c2", 1, False), ("c1", 2, True), ("c1", 3, True)]),
    ],
)
def test_an_invalid_run_is_replaced_at_most_twice(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, bad: int, expected: list[tuple[str, int, bool]]
) -> None:
    left = [bad]
    real = validity.problems

    def problems(run: Any, bands: Any, *more: Any) -> tuple[str, ...]:
        if run.case.level == "c1" and left[0]:
            left[0] -= 1
            return ("planted",)
        return real(run, bands, *more)

    monkeypatch.setattr(validity, "problems", problems)
    made = begin()
    measure(made)
    assert measured(made) == expected
    assert [record.attempt for record in made.results.launches] == sorted(
        {attempt for _, attempt, _ in expected}
    )
    measure(made)  # nothing is left to do
    assert measured(made) == expected


def test_a_spent_budget_starts_nothing_more(begin: Begin) -> None:
    made = begin(overrides=["budget.night_minutes=0.01"])
    made.started_s -= 1.0
    measure(made)
    assert measured(made) == []
    (record,) = made.results.launches
    assert record.failure_kind == "budget"
    reason = made.results.why_missing(made.suite.cases()[0], 1)
    assert "the night's budget of 0.01 minutes was spent" in reason


@pytest.mark.parametrize("arrivals", ["poisson", "burst", "constant"])
def test_open_loop_is_measured_when_it_is_due(begin: Begin, arrivals: str) -> None:
    load = f'rate_per_s = [40]\narrivals = "{arrivals}"\nrequests = 12'
    made, again = begin(load), begin(load, fresh=True)
    measure(made)
    measure(again)
    # On a machine that was busy elsewhere a Run may have been replaced.
    run, other = made.results.runs[-1], again.results.runs[-1]
    assert not run.invalid
    assert all(record.completed for record in run.records)
    assert [r.due_s for r in run.records] == pytest.approx([r.due_s for r in other.records])
    assert run.schedule_hash == other.schedule_hash


TRACE = "time_s,prompt_tokens,output_tokens\n" + "".join(
    f"{at},{8 + k},{2 + k % 3}\n" for k, at in enumerate((3, 3.05, 3.05, 3.2, 3.25, 3.3))
)


@pytest.mark.parametrize(
    "load",
    [
        "ramp = { from = 10, to = 90, seconds = 0.4 }",
        "stages = [{ rate_per_s = 60, seconds = 0.2 }, { rate_per_s = 30, seconds = 0.2 }]",
        'replay = "trace.csv"\nreplay_speed = [2]',
        'rate_per_s = [40]\narrivals = "gamma"\nburstiness = 0.5\nrequests = 12',
        "rate_per_s = [40]\nrequests = 12\ntemperature = 0.7\nprefix = { tokens = 5 }",
    ],
)
def test_every_kind_of_load_is_measured_as_its_level_says(
    begin: Begin, tmp_path: Path, load: str
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    lengths = "prompt_tokens = 8\noutput_tokens = 3\n"
    made = begin(load, **({"text": SUITE.replace(lengths, "")} if "replay" in load else {}))
    measure(made)
    run, (workload,) = made.results.runs[-1], made.suite.workloads
    assert not run.invalid
    assert len(run.records) == run.level.num_requests == workload.levels[0].num_requests
    due = arrivals.schedule(run.level, made.suite.seed, 1, workload.prompts.trace)
    assert [r.due_s for r in run.records] == pytest.approx(due)
    asked = lengths_of(workload.prompts, len(due), made.suite.seed)
    assert [r.completion_tokens for r in run.records] == [output for _, output in asked]
    assert all(record.completed for record in run.records)
    made.verify_all()
    made.finish()
    assert made.results.finished
    told = verdict.judge_equality(made.results, run.case).verdict
    assert told == ("SKIPPED" if "temperature" in load else "PASS")


def test_a_night_is_carried_on_only_by_its_like(begin: Begin) -> None:
    made = begin()
    measure(made)
    assert begin().folder == made.folder
    assert begin().resumed_runs == len(made.results.runs) >= 2
    assert begin(overrides=["suite.seed=2"]).folder != made.folder
    assert begin(fresh=True).folder != made.folder


def test_a_finished_night_is_not_carried_on(begin: Begin) -> None:
    made = begin()
    measure(made)
    made.verify_all()
    made.finish()
    assert made.results.finished
    assert begin().folder != made.folder


def test_an_unverified_night_is_not_finished(begin: Begin) -> None:
    made = begin()
    measure(made)
    made.finish()
    assert not made.results.finished


def test_the_reference_generates_even_if_it_was_interrupted(begin: Begin) -> None:
    made = begin()
    measure(made)
    made.verify_all()
    assert len(made.results.generated) == 2
    lines = (made.folder / "journal.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"type": "generated"' not in line]
    (made.folder / "journal.jsonl").write_text("".join(kept))
    again = begin()
    again.verify_all()
    assert again.results.generated == made.results.generated


def test_time_left_is_known_once_a_level_was_measured(begin: Begin) -> None:
    made = begin(overrides=["suite.launches=2"])
    made.expect(made.suite.cases())
    assert made.seconds_left() is None
    first = night.order(made.suite)[0]
    live = night.LiveLaunch(made, first)
    live.measure(made.cases)
    live.stop()
    spans = {run.case.level: run.span_s for run in made.results.runs}
    assert made.seconds_left() == pytest.approx(spans["c1"] + spans["c2"])


def test_the_warm_up_is_reported(begin: Begin) -> None:
    made = begin()
    measure(made)
    by_level = {run.case.level: run.engine for run in made.results.runs}
    assert by_level["c1"]["warmup_requests"] >= 2
    assert by_level["c2"]["warmup_requests"] >= 4
    assert by_level["c2"]["warmup_failed"] == 0
    assert by_level["c1"]["peak_rss_bytes"] > 1 << 20


# Three waves of two wait for something that is compiled, each for less; the first token as well.
COMPILES = "args = {{ ttft_s = 0.03, itl_s = 0.005, compile_requests = 7, compile_s = 0.7 }}"


def compiling(begin: Begin, *overrides: str) -> Night:
    text = re.sub("args = .*", COMPILES, SUITE)
    made = begin("concurrency = [2]\nrequests = 8", text=text, overrides=overrides)
    measure(made)
    return made


def test_an_engine_that_compiles_is_waited_for(begin: Begin) -> None:
    run = compiling(begin).results.runs[-1]
    assert 5 * 2 <= run.engine["warmup_requests"] <= 8 * 2
    assert run.engine["warmup_stable"] == 1
    assert run.engine["warmup_s"] > 0.7 * (6 + 4 + 2) / 7
    assert max(record.events[0].at_s - record.due_s for record in run.records) < 0.3


def test_a_warm_up_has_its_bound_and_says_that_it_was_not_stable(begin: Begin) -> None:
    made = compiling(begin, "suite.warmup_timeout_s=0.8")
    run = made.results.runs[-1]
    assert run.engine["warmup_stable"] == 0
    assert run.engine["warmup_failed"] == 0
    assert run.engine["warmup_requests"] == 2 * 2
    assert 0.6 < run.engine["warmup_s"] < 1.5
    judged = verdict.judge(made.results, verdict.Memory())
    made_report = document(made.results, judged, headway_version="0")
    (notice,) = made_report["cases"][0]["runs"][0]["notices"]
    assert notice.startswith("its warm-up was not stable after 4 requests and 0.")


def test_two_states_of_one_commit_are_two_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_commit() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    file = tmp_path / "engine.py"
    file.write_text("one")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    clean = read_commit()
    file.write_text("two")
    dirty = read_commit()
    file.write_text("three")
    assert len({clean, dirty, read_commit()}) == 3
    assert clean is not None
    assert "dirty" not in clean


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ('metric = "output_throughput"\nlevel = "r5"\nmin = 1.0', "is the arrival rate"),
        ('metric = "launch_time"\nlevel = "c1"\nmax = 9.0', "name neither workload nor level"),
        ('metric = "throughput"\nmin = 1.0', "limit[0].metric is 'throughput'; allowed:"),
    ],
)
def test_a_limit_that_judges_nothing_is_refused(tmp_path: Path, limit: str, says: str) -> None:
    path = tmp_path / "tiny.toml"
    load = "concurrency = [1]\nrate_per_s = [5]"
    path.write_text(SUITE.format(load=load) + f"\n[[limit]]\n{limit}\n")
    with pytest.raises(suite.SuiteError) as caught:
        outlook.check(suite.load(path))
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_kind_names_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(load="concurrency = [1]"))
    loaded = suite.load(path, ["engine.fake_a.kind=vlm"])
    message = r"engine.fake_a.kind is 'vlm'; allowed: command, fake, hf_"
    with pytest.raises(suite.SuiteError, match=message):
        available.available(loaded, (), tmp_path, str)


def test_the_plan_says_what_a_night_will_do(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(load="concurrency = [1, 2]"))
    loaded = suite.load(path)
    text = outlook.describe(loaded, outlook.Known())
    for words in ("1 launches", "2 Runs", "fake_a-1", "no baseline yet", "no night over it"):
        assert words in text
    visible = {("fake_a-w-c1", "ttft_p50"): 0.07}
    loaded = suite.load(path, ['baseline.metrics=["ttft_p50"]'])
    text = outlook.describe(loaded, outlook.Known(90.0, visible))
    assert "smallest visible change: ttft_p50 7%" in text
    assert "the last night over it measured for 1.5 minutes" in text


KEY = "s3cr3t-0f-mine"


def test_a_key_comes_from_the_environment_and_goes_into_no_file(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    sent: list[bytes] = []
    post = Target.post

    def noted(self: Target, *given: Any) -> bytes:
        sent.append(post(self, *given))
        return sent[-1]

    monkeypatch.setattr(Target, "post", noted)
    made = begin(
        "concurrency = [1]\nrequests = 4", overrides=['engine.fake_a.api_key_env="MY_KEY"']
    )
    measure(made)
    assert len(made.results.runs) >= 1
    assert all(f"\r\nAuthorization: Bearer {KEY}\r\n".encode() in data for data in sent)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_key_that_is_not_set_is_said(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    made = begin(overrides=['engine.fake_a.api_key_env="MY_KEY"'])
    measure(made)
    (record,) = made.results.launches
    assert record.failure_kind == "no_api_key"
    assert record.failure == "engine.fake_a.api_key_env is MY_KEY, which is not set here"
