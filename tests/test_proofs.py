"""The gate is proven by planted faults, through the shipped command on fake engines."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

SPEED = {"output_throughput", "decode_throughput", "ttft_p50", "tpot_p50", "e2el_p50"}


def planted(workspace: Any, *faults: str) -> Any:
    """Run the small suite with faults in fake_b."""
    words = [word for fault in faults for word in ("--set", f"engine.fake_b.args.{fault}")]
    return workspace.mini(*words)


def test_without_a_fault_everything_is_green(workspace: Any) -> None:
    done = workspace.mini()
    assert done.code == 0, done.text
    assert done.failed() == {}
    assert done.cells("PASS", "RECORDING") == done.cells(
        *{c["verdict"] for c in done.report()["cells"]}
    )
    assert done.journal("end")


@pytest.mark.parametrize("slow", ["fake_a", "fake_b"])
def test_a_slowdown_is_red_where_it_is_and_nowhere_else(workspace: Any, slow: str) -> None:
    done = workspace.mini("--set", f"engine.{slow}.args.slower=0.4")
    assert done.code == 1, done.text
    assert done.cells("LIMIT") == {(slow, "tpot_p50")}
    assert set(done.failed()) == {f"test_tpot[{slow}-w-c1]", f"test_tpot[{slow}-w-c2]"}
    assert all(message.startswith("LIMIT ") for message in done.failed().values())


def test_a_wrong_token_is_wrong_output(workspace: Any) -> None:
    done = planted(workspace, "wrong_token_every=7")
    assert done.code == 1
    assert done.cells("WRONG") == {("fake_b", "greedy_equality")}
    assert "WRONG OUTPUT" in done.text
    message = next(iter(done.failed().values()))
    assert message.startswith("WRONG fake_b-w-c")
    assert "token 3" in message


def test_death_in_mid_stream_is_red_for_the_dead_only(workspace: Any) -> None:
    done = planted(workspace, "die_after_requests=20")
    assert done.code == 1
    red = done.cells("LIMIT", "MISSING", "WRONG", "INVALID", "REGRESSION")
    assert {instance for instance, _ in red} == {"fake_b"}
    assert ("fake_b", "success_rate") in red
    assert {("fake_b", metric) for metric in SPEED} <= red
    assert all("fake_b" in test for test in done.failed())
    assert any("the engine ended in level" in text for text in done.failed().values())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("die_while_loading=true", "planted death while loading"),
        ("wrong_model=true", "serves not_fake, not fake"),
        ("no_such_argument=1", "no_such_argument"),
    ],
)
def test_an_engine_that_does_not_come_up_fails_alone(workspace: Any, fault: str, says: str) -> None:
    done = planted(workspace, fault)
    assert done.code == 1
    assert all("fake_b" in test for test in done.failed())
    assert all(text.startswith("MISSING ") for text in done.failed().values())
    assert any(says in text for text in done.failed().values())
    assert ("fake_a", "greedy_equality") in done.cells("PASS")


def test_an_engine_that_is_never_ready_fails_alone(workspace: Any) -> None:
    done = workspace.mini(
        *("--set", "engine.fake_b.args.hang_on_start=true"),
        *("--set", "engine.fake_b.start_timeout_s=2"),
    )
    assert done.code == 1
    assert any("not ready after 2 s" in text for text in done.failed().values())
    assert all("fake_b" in test for test in done.failed())


@pytest.mark.parametrize(
    ("fault", "metric", "says"),
    [
        ("fail_every=5", "success_rate", "http_500"),
        ("stall_request=20", "success_rate", "read_timeout"),
        ("short_output_every=5", "token_accuracy", ""),
        ("lie_usage_every=5", "token_accuracy", ""),
    ],
)
def test_what_an_engine_gets_wrong_is_counted(
    workspace: Any, fault: str, metric: str, says: str
) -> None:
    done = planted(workspace, fault)
    assert done.code == 1
    assert ("fake_b", metric) in done.cells("LIMIT")
    assert {instance for instance, _ in done.cells("LIMIT", "MISSING", "INVALID")} == {"fake_b"}
    assert any(says in text for text in done.failed().values())


def test_a_killed_night_resumes_and_leaves_no_process(command: Any, workspace: Any) -> None:
    workspace.write(launches=2)
    with workspace.start("run", "mini") as process:
        workspace.wait_for_runs(3)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    assert command.nothing_left(workspace.folder)
    before = workspace.runs_so_far()
    done = workspace.mini()
    assert done.code == 0, done.text
    assert f"resumed: {before} Runs are there" in done.text
    # One that was invalid is replaced; none that was valid is measured again.
    runs = [
        (r["case"]["instance"], r["launch"], r["case"]["level"])
        for r in done.journal("run")
        if not r.get("invalid")
    ]
    assert len(runs) == len(set(runs)) == 8
    assert len(done.nights) == 1
    assert done.journal("end")


def test_an_interrupted_night_reports_what_it_has_and_resumes(command: Any, workspace: Any) -> None:
    workspace.write(launches=2)
    with workspace.start("run", "mini") as process:
        workspace.wait_for_runs(2)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    stopped = command.Done(process.returncode, text, workspace.folder)
    assert stopped.code == 3, text
    assert command.nothing_left(workspace.folder)
    assert not stopped.report()["finished"]
    assert stopped.cells("MISSING")
    done = workspace.mini()
    assert done.code == 0, done.text
    assert "resumed:" in done.text
    assert len(done.nights) == 1
    assert done.report()["finished"]


def test_case_17_a_night_that_is_stopped_while_a_stream_stalls_keeps_what_it_has(
    command: Any, workspace: Any
) -> None:
    workspace.write()
    stall = [f"engine.{name}.args.stall_request=22" for name in command.INSTANCES]
    words = [word for one in [*stall, "suite.idle_timeout_s=60"] for word in ("--set", one)]
    with workspace.start("run", "mini", *words) as process:
        workspace.wait_for_runs(1)
        time.sleep(1.5)  # the level after it has come to the request that is never answered
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    stopped = command.Done(process.returncode, text, workspace.folder)
    assert stopped.code == 3, text
    assert command.nothing_left(workspace.folder)
    assert not stopped.report()["finished"]
    assert len(stopped.journal("run")) == 1


def test_a_finished_night_is_not_resumed(workspace: Any) -> None:
    first = workspace.mini("-k", "test_tpot")
    second = workspace.mini("-k", "test_tpot")
    assert first.code == second.code == 0
    assert len(second.nights) == 2


def test_an_engine_killed_from_outside_is_seen(command: Any, workspace: Any) -> None:
    workspace.write(launches=2)
    with workspace.start("run", "mini") as process:
        workspace.wait_for_runs(1)
        for pid in command.ours(workspace.folder):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"headway.engines.host" in line and b"supervise.py" not in b" ".join(line):
                command.kill(pid)
        text, _ = process.communicate(timeout=120)
    done = command.Done(process.returncode, text, workspace.folder)
    assert done.code == 1, text
    assert len({test.split("[")[1].rstrip("]").split("-")[0] for test in done.failed()}) == 1
