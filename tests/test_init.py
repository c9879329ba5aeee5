"""`headway init` in an empty folder: what it writes runs, and catches what is planted in it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

WRITTEN = {
    ".gitignore",
    "baselines/README.md",
    "my_engines/__init__.py",
    "my_engines/echo.py",
    "reports/README.md",
    "suites/gpu.toml",
    "suites/mine.toml",
    "suites/quick.toml",
    "suites/smoke.toml",
}
# As suites/mine.toml itself tells its reader to plant them.
WRONG = "run mine --set engine.echo.args.wrong=true"
SLOW = "run mine --set engine.echo.args.step_s=0.015"
ONCE = ("--set", "suite.launches=1")


@pytest.fixture
def begun(unmeasured: Any) -> Any:
    """An empty folder after `headway init`."""
    shutil.rmtree(unmeasured.folder / "suites")
    done = unmeasured.run("init")
    assert done.code == 0, done.text
    return unmeasured


def test_init_writes_a_repository_and_says_what(begun: Any) -> None:
    files = {
        path.relative_to(begun.folder).as_posix()
        for path in begun.folder.rglob("*")
        if path.is_file()
    }
    assert files == WRITTEN
    for command in (WRONG, SLOW):
        assert f"#   headway {command} " in (begun.folder / "suites" / "mine.toml").read_text()


def test_init_again_changes_nothing(begun: Any) -> None:
    changed = begun.folder / "my_engines" / "echo.py"
    changed.write_text("mine now\n")
    (begun.folder / "suites" / "gpu.toml").unlink()
    done = begun.run("init")
    assert done.code == 0
    assert changed.read_text() == "mine now\n"
    assert "my_engines/echo.py is there already, left alone" in done.text
    assert "suites/gpu.toml written" in done.text


@pytest.mark.parametrize("suite", ["smoke", "quick", "gpu", "mine"])
def test_every_suite_that_init_writes_can_be_planned(begun: Any, suite: str) -> None:
    done = begun.run("plan", suite)
    assert done.code == 0, done.text


@pytest.mark.alone
def test_the_engine_that_init_writes_is_measured_and_right(begun: Any) -> None:
    done = begun.run("run", "mine")
    assert done.code == 0, done.text
    assert done.failed() == {}
    assert ("echo", "greedy_equality") in done.cells("PASS")
    assert {("echo", "tpot_p50"), ("echo", "output_throughput")} <= done.cells("PASS")
    kinds = {launch["instance"]: launch["info"]["kind"] for launch in done.journal("launch")}
    assert kinds == {"fake": "fake", "echo": "echo"}
    # Its steps alone, by its own clock: never shorter than it was told to make them.
    steps = [step for step in done.journal("step") if step["instance"] == "echo"]
    assert {(step["phase"], step["batch"]) for step in steps} == {
        (phase, batch) for phase in ("prefill", "decode") for batch in (1, 4)
    }
    assert min(min(step["seconds"]) for step in steps) >= 0.01


@pytest.mark.alone
def test_a_wrong_token_in_it_is_wrong_output(begun: Any) -> None:
    done = begun.run(*WRONG.split(), *ONCE)
    assert done.code == 1, done.text
    assert done.cells("WRONG") == {("echo", "greedy_equality")}
    assert "WRONG OUTPUT" in done.text
    assert all("echo" in test for test in done.failed())
    assert all("token 1 is not what the reference" in text for text in done.failed().values())


@pytest.mark.alone
def test_a_slowdown_in_it_is_red(begun: Any) -> None:
    done = begun.run(*SLOW.split(), *ONCE)
    assert done.code == 1, done.text
    assert ("echo", "tpot_p50") in done.cells("LIMIT")
    assert all("echo" in test for test in done.failed())
    assert ("echo", "greedy_equality") in done.cells("PASS")
