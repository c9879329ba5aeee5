"""The plugin and the command: selection, replay, refusals, and one clear message for bad input."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway import baseline
from headway.cli import main
from headway.core import Case
from headway.fingerprint import read_machine


def test_a_night_leaves_everything_a_reader_needs(workspace: Any) -> None:
    workspace.write(steps="[1, 8]")
    done = workspace.mini()
    assert done.code == 0, done.text
    names = {path.name for path in done.night.iterdir()}
    assert names == {"journal.jsonl", "report.json", "report.md", "junit.xml", "logs"}
    assert {path.name for path in (done.night / "logs").iterdir()} == {
        "fake_a-1.log",
        "fake_b-1.log",
        "reference.log",
        "telemetry.log",
    }
    cells = {(c["instance"], c["metric"]): c["value"] for c in done.report()["cells"]}
    for batch in (1, 8):
        assert cells["fake_a", f"decode_step_b{batch}"] == pytest.approx(0.008)
        assert cells["fake_a", f"prefill_step_b{batch}"] == pytest.approx(0.04)
    assert cells["fake_b", "launch_time"] > 0
    assert 'name="verdict" value="PASS"' in (done.night / "junit.xml").read_text()
    # What a reader selects is there in the progress: instance, launch, level, requests.
    assert "fake_a launch 1 of 1 w c2: 11 requests" in done.text


def test_a_night_is_judged_again_without_an_engine(workspace: Any) -> None:
    first = workspace.mini("--set", "engine.fake_b.args.slower=0.4")
    lines = first.journal("run")
    again = workspace.run("judge", str(first.night))
    assert again.code == first.code == 1
    assert again.failed().keys() == first.failed().keys()
    assert len(again.nights) == 1
    assert again.journal("run") == lines
    assert again.cells("LIMIT") == {("fake_b", "tpot_p50")}


def test_what_a_selected_reader_needs_is_measured(workspace: Any) -> None:
    done = workspace.mini("-k", "test_tpot and fake_a and c2")
    assert done.code == 0, done.text
    runs = {(run["case"]["instance"], run["case"]["level"]) for run in done.journal("run")}
    # The other instance too: the limit is on their ratio.
    assert runs == {("fake_a", "c2"), ("fake_b", "c2")}
    assert "1 passed" in done.text


def test_a_reader_without_a_ratio_needs_one_instance(workspace: Any) -> None:
    done = workspace.mini("-k", "test_success_rate and fake_a and c1")
    assert {run["case"]["instance"] for run in done.journal("run")} == {"fake_a"}
    assert done.code == 0


def test_engines_and_levels_are_selected_by_name(workspace: Any) -> None:
    done = workspace.mini("--engine", "fake_b", "--level", "c1", "-k", "not test_tpot")
    runs = {(run["case"]["instance"], run["case"]["level"]) for run in done.journal("run")}
    assert runs == {("fake_b", "c1")}
    assert done.code == 0, done.text


def test_a_part_of_a_night_is_judged_again(workspace: Any) -> None:
    first = workspace.mini("--level", "c1", "--engine", "fake_a", "-k", "not tpot")
    again = workspace.run("judge", str(first.night))
    assert again.code == first.code == 0, again.text
    assert "fake_b-w" not in again.text
    assert "w-c2" not in again.text


def test_a_partner_of_a_ratio_is_measured_beside_and_verified(workspace: Any) -> None:
    done = workspace.mini("--engine", "fake_a")
    assert done.code == 0, done.text
    assert {run["case"]["instance"] for run in done.journal("run")} == {"fake_a", "fake_b"}
    assert done.journal("end")
    assert ("fake_b", "greedy_equality") in done.cells("PASS")


def test_without_its_measuring_items_a_night_is_verified_too(workspace: Any) -> None:
    done = workspace.mini("-k", "not test_measure and not test_step")
    assert done.code == 0, done.text
    assert ("fake_a", "greedy_equality") in done.cells("PASS")


def test_steps_are_not_timed_twice(command: Any, workspace: Any) -> None:
    workspace.write(launches=2, steps="[1]")
    with workspace.start("run", "mini") as process:
        workspace.wait_for_runs(5)
        command.kill(process.pid)
        process.wait(10)
    done = workspace.mini()
    assert done.code == 0, done.text
    steps = [(s["instance"], s["launch"], s["phase"]) for s in done.journal("step")]
    assert len(steps) == len(set(steps)) == 8


def test_strict_fails_what_cannot_be_told_yet(workspace: Any) -> None:
    broke = ("--set", "budget.night_minutes=0.0001")
    done = workspace.mini("--strict", "--fresh", "-k", "test_ttft", *broke)
    assert done.code == 3, done.text
    said = list(done.failed().values())
    assert said
    assert all(text.startswith("INCONCLUSIVE ") for text in said)
    assert all("budget of 0.0001 minutes was spent" in text for text in said)
    assert workspace.mini("--fresh", "-k", "test_ttft", *broke).code == 0


def test_what_still_records_within_its_time_does_not_fail_a_strict_night(workspace: Any) -> None:
    done = workspace.mini("--strict", "-k", "test_ttft")
    assert done.code == 0, done.text
    assert done.cells("RECORDING")


def test_sampled_outputs_are_not_judged_and_the_test_says_why(workspace: Any) -> None:
    """Neither a pass nor a failure, not in a strict night either; the speeds are judged."""
    workspace.write()
    sets = ("--set", "workload.w.temperature=0.7", "--set", "workload.w.prefix={tokens=4}")
    done = workspace.mini("--strict", *sets, "-k", "test_greedy_equality or test_success_rate")
    assert done.code == 0, done.text
    cells = {(c["metric"], c["verdict"], c["word"]) for c in done.report()["cells"]}
    assert ("greedy_equality", "SKIPPED", "NOT JUDGED") in cells
    assert ("success_rate", "PASS", "OK") in cells
    assert "4 passed, 4 skipped" in done.text
    junit = (done.night / "junit.xml").read_text()
    assert "outputs are sampled (temperature 0.7, top_p 1): none was verified" in junit
    assert all(case["outputs"] is None for case in done.report()["cases"])
    runs = [run for case in done.report()["cases"] for run in case["runs"]]
    assert {run["fill_s"] for run in runs} == {0.0, 0.005}
    assert all(0.2 < run["expected_hit_rate"] < 0.4 for run in runs)
    assert "NOT JUDGED" in done.text


USAGE = [
    (
        ("run", "mimi"),
        "there is no suite 'mimi'; known: gpu, kv_cache, ladder, mini, quick, servers, smoke (did "
        "you mean mini?)",
    ),
    (("run", "mini", "--set", "suite.launchs=3"), "suite.launchs is not known; allowed:"),
    (
        ("run", "mini", "--engine", "vllm"),
        "--headway-engine 'vllm' is not in the suite: fake_a, fake_b",
    ),
    (("run", "mini", "--level", "c99"), "--headway-level 'c99' is not in the suite: c1, c2"),
    (("run", "mini", "-n", "2"), "xdist would measure several engines at once; run without -n"),
    (("run", "mini", "-k", "no_such_test"), "deselected"),
    (("judge", "nowhere"), "journal.jsonl cannot be read: No such file"),
    (("run", "mini", "--device", "cuda"), "nvidia-smi finds no GPU; use --headway-device cpu"),
    (
        ("run", "mini", "--set", "engine.fake_a.kind=vlm"),
        "engine.fake_a.kind is 'vlm'; allowed: command, fake, hf_naive",
    ),
    (("run", "mini", "--set", "baseline.metrics=[1]"), "baseline.metrics"),
    (("plan", "mimi"), "there is no suite 'mimi'"),
    (("gate", "nowhere"), "nowhere cannot be read"),
    (("compare", "nowhere", "nowhere"), "nowhere cannot be read"),
    (("baseline", "propose", "reports/nowhere"), "journal.jsonl cannot be read"),
]


@pytest.mark.parametrize(("words", "says"), USAGE, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_clear_message(unmeasured: Any, words: tuple[str, ...], says: str) -> None:
    done = unmeasured.run(*words)
    assert done.code == 2, done.text
    assert says in done.text
    assert not {"Traceback", "INTERNALERROR", "Error:"} & set(done.text.split())
    assert done.nights == []


@pytest.mark.parametrize(
    ("plugin", "text", "says"),
    [
        ("rerunfailures", "", "a rerun turns an error rate into best-of-k"),
        ("random_order", "", "the night has an order of its own"),
        (
            "tracer",
            "import sys\nsys.settrace(lambda *_: None)\n",
            "a tracer (coverage, a debugger)",
        ),
    ],
)
def test_what_would_spoil_a_measurement_is_refused(
    unmeasured: Any, plugin: str, text: str, says: str
) -> None:
    (unmeasured.folder / f"{plugin}.py").write_text(text)
    done = unmeasured.mini("-p", plugin)
    assert done.code == 2, done.text
    assert says in done.text
    assert done.nights == []


def test_reports_that_cannot_be_written_are_said_at_once(unmeasured: Any) -> None:
    (unmeasured.folder / "taken").write_text("a file")
    done = unmeasured.mini("--reports", "taken/reports")
    assert done.code == 2
    assert "cannot be written" in done.text
    assert "Traceback" not in done.text


def test_a_disk_that_fills_up_loses_nothing(workspace: Any) -> None:
    limit = 40_000

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = workspace.mini(preexec_fn=small_files)
    assert done.code in (1, 3)
    assert "Traceback" not in done.text
    assert "INVALID" in done.text
    assert "journal.jsonl cannot be written: File too large" in done.text
    assert 1 <= len(done.journal("run")) < 4
    resumed = workspace.mini()
    assert resumed.code == 0, resumed.text
    assert len(resumed.nights) == 1


def test_a_second_night_on_the_same_device_is_refused(workspace: Any) -> None:
    with workspace.start("run", "mini") as first:
        workspace.wait_for_runs(1)
        second = workspace.mini()
        text, _ = first.communicate(timeout=120)
    assert second.code == 2
    assert "is being measured by night mini (process" in second.text
    assert first.returncode == 0, text


def test_a_broken_baseline_fails_its_own_cells(workspace: Any) -> None:
    device = read_machine("cpu").device
    case = Case("fake_a", "fake", "w", "c1")
    stored = baseline.path_of(workspace.folder / "baselines", device, case)
    stored.parent.mkdir(parents=True)
    stored.write_text("{")
    words = ["run", "mini", "-k", "test_ttft", "--device", "cpu"]
    for text in ("{", '{"schema": 99}', '{"schema": 1, "surprise": 2}'):
        stored.write_text(text)
        done = workspace.run(*words)
        assert set(done.failed()) == {"test_ttft[fake_a-w-c1]"}
        assert done.failed()["test_ttft[fake_a-w-c1]"].startswith("INCOMPATIBLE ")
        assert done.code == 1
        words = ["judge", str(done.night), "-k", "test_ttft"]  # measured once, judged thrice


@pytest.mark.slow
@pytest.mark.alone
def test_a_baseline_is_proposed_accepted_and_used(workspace: Any) -> None:
    """The life of a baseline: nights, patches, and then a slowdown without a second engine."""
    subprocess.run(["git", "init", "-q"], cwd=workspace.folder, check=True)
    more = "\n[baseline]\nmin_launches = 3\nmin_nights = 3\nresolution = 5.0\n"
    workspace.write(more=more)
    for number in range(1, 4):
        done = workspace.mini("--fresh")
        assert (f"{number} of 3 launches, night {number} of 3" in str(done.report())) == (
            number < 3
        )
        code = workspace.run("baseline", "propose", str(done.night)).code
        assert code == (0 if number == 3 else 2)
    patch = ["git", "apply", str(done.night / "baseline.patch")]
    subprocess.run(patch, cwd=workspace.folder, check=True)
    slow = [f"engine.{name}.args.slower=0.5" for name in ("fake_a", "fake_b")]
    done = workspace.mini("--set", slow[0], "--set", slow[1])
    assert done.code == 1
    assert ("fake_a", "tpot_p50") in done.cells("REGRESSION")
    assert any(text.startswith("REGRESSION fake_b") for text in done.failed().values())
    assert "args.slower: absent" in str(done.report())


@pytest.mark.slow
def test_the_gate_and_the_comparison_of_two_nights(workspace: Any) -> None:
    workspace.write(launches=2)
    good = workspace.mini()
    slow = workspace.mini("--set", "engine.fake_b.args.slower=0.4")
    old, new = good.nights[0], slow.nights[-1]
    assert workspace.run("gate", str(old)).code == 0
    failing = workspace.run("gate", str(new))
    assert failing.code == 1
    assert "LIMIT fake_b-w-c1 tpot_p50" in failing.text
    (cause,) = (c for c in slow.report()["causes"] if c["verdict"] == "LIMIT")
    assert "\n  ".join([cause["headline"], *cause["explanation"]]) in failing.text
    same = workspace.run("compare", str(old), str(old))
    assert same.code == 0, same.text
    worse = workspace.run("compare", str(old), str(new))
    assert worse.code == 1
    assert json.loads(workspace.run("compare", "--json", str(old), str(new)).text)


FOREIGN = """
import pytest
@pytest.fixture
def engine():
    return "my own"
@pytest.fixture
def cell():
    return 7
def test_mine(engine, cell):
    assert (engine, cell) == ("my own", 7)
"""


def test_other_peoples_tests_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(FOREIGN)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert [path.name for path in tmp_path.glob("*.py")] == ["test_theirs.py"]
    assert not (tmp_path / "reports").exists()


def test_the_exit_statuses_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "0 good, 1 slower or wrong, 2 usage, 3 cannot tell" in capsys.readouterr().out
