"""An optional engine that cannot be had is left out, and said; the others are measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headway import available, environment, suite
from headway.environment import EnvironmentFailed
from headway.suite import Suite, SuiteError, without

SUITE = """
[suite]
model = "fake"
[engine.base]
kind = "fake"
[engine.other]
kind = "fake"
{marked}
[engine.ghost]
kind = "{kind}"
optional = true
{more}
[workload.w]
prompt_tokens = 8
output_tokens = 3
concurrency = [1]
"""
LIMITS = """
[[limit]]
metric = "ttft_p50"
engine = "ghost"
max = 1.0
[[limit]]
metric = "ttft_p50"
engine = "base"
over = "ghost"
max = 1.0
[[limit]]
metric = "tpot_p50"
over = "*"
max = 1.2
[[limit]]
metric = "success_rate"
engine = "ghost"
min = 0.9
"""


def load(tmp_path: Path, text: str = "", kind: str = "no_such", **more: str) -> Suite:
    path = tmp_path / "tiny.toml"
    fields = {"marked": "", "more": "", **more}
    path.write_text(SUITE.format(kind=kind, **fields) + text)
    return suite.load(path)


def test_what_is_said_of_it_alone_goes_with_it(tmp_path: Path) -> None:
    whole = load(tmp_path, LIMITS)
    left = without(whole, {"ghost": "it is not there"})
    assert [i.name for i in left.instances] == ["base", "other"]
    assert left.left_out == {"ghost": "it is not there"}
    kept = {(limit.metric, limit.engine, limit.over) for limit in left.limits}
    assert ("tpot_p50", None, "*") in kept
    assert not [limit for limit in left.limits if "ghost" in (limit.engine, limit.over)]
    assert {("success_rate", name, None) for name in ("base", "other")} <= kept
    assert without(whole, {}) is whole
    alone = without(whole, {"ghost": "x", "other": "y"})
    assert not [limit for limit in alone.limits if limit.over]
    with pytest.raises(SuiteError, match="none can be had here: ghost: x"):
        without(whole, dict.fromkeys(("ghost", "other", "base"), "x"))


def test_the_reference_gate_goes_on_with_who_is_left(tmp_path: Path) -> None:
    whole = load(tmp_path, marked="reference = true")
    assert whole.reference is not None
    left = without(whole, {"ghost": "x"})
    assert left.reference is not None
    assert left.reference.candidates == ("base",)
    assert without(whole, {"ghost": "x", "base": "x"}).reference is None
    with pytest.raises(SuiteError, match="optional is true of the reference"):
        load(tmp_path, more="reference = true")


def found(loaded: Suite, tmp_path: Path, *wanted: str) -> dict[str, str]:
    said: list[str] = []
    return dict(available.available(loaded, wanted, tmp_path, said.append).left_out)


def test_a_kind_that_there_is_not_is_refused_though_it_is_optional(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="kind is 'no_such'; allowed: "):
        found(load(tmp_path), tmp_path)
    assert found(load(tmp_path, kind="sglang", more='python = "/x"'), tmp_path)


def test_a_command_and_an_image_are_not_looked_for_here(tmp_path: Path) -> None:
    command = 'args = { command = ["serve"], dialect = "vllm" }'
    assert found(load(tmp_path, kind="command", more=command), tmp_path) == {}
    image = 'python = "/in/it"\nimage = "repo/name@sha256:' + 64 * "0" + '"'
    assert found(load(tmp_path, kind="sglang", more=image), tmp_path) == {}


def test_a_python_of_ones_own_must_be_there(tmp_path: Path) -> None:
    missing = load(tmp_path, kind="sglang", more='python = "/no/such/python"')
    assert found(missing, tmp_path) == {"ghost": "its python /no/such/python is not there"}
    there = load(tmp_path, kind="sglang", more=f'python = "{sys.executable}"')
    assert found(there, tmp_path) == {}
    assert found(load(tmp_path, kind="mine:Mine"), tmp_path) == {}
    assert found(load(tmp_path, kind="fake"), tmp_path) == {}


def test_what_can_be_made_is_made_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(plans: Any, home: Path, say: Any) -> None:
        made.extend(planned.environment.name for planned in plans)
        if len(made) > 1:
            raise EnvironmentFailed("it could not be made: no wheel fits\nCheck that pip reaches")

    monkeypatch.setattr(environment, "make", make)
    loaded = load(tmp_path, kind="hf_naive")
    assert found(loaded, tmp_path) == {}
    assert made == []
    assert found(loaded, tmp_path, "ghost") == {}
    assert made == ["hf"]
    assert found(loaded, tmp_path, "ghost") == {"ghost": "it could not be made: no wheel fits"}


GHOST = """
[engine.ghost]
kind = "sglang"
python = "/no/such/python"
optional = true

[[limit]]
metric = "tpot_p50"
engine = "ghost"
max = 1.0
"""


def test_a_night_goes_on_without_it_and_says_so(workspace: Any) -> None:
    workspace.write(more=GHOST)
    done = workspace.mini()
    assert done.code == 0, done.text
    line = "left out: ghost: its python /no/such/python is not there"
    before, _, after = done.text.partition("night ")
    assert line in before
    assert line in after
    report = done.report()
    assert list(report["suite"]["left_out"]) == ["ghost"]
    assert {i["name"] for i in report["instances"]} == {"fake_a", "fake_b"}
    assert "left out: ghost" in (done.night / "report.md").read_text()
    assert "ghost" not in (done.folder / "reports" / "junit.xml").read_text()
    again = workspace.run("judge", str(done.night))
    assert again.code == 0, again.text
    assert line in again.text


def test_asking_for_it_alone_says_why_not(workspace: Any) -> None:
    workspace.write(more=GHOST)
    done = workspace.mini("--engine", "ghost")
    assert done.code == 2
    assert (
        "--headway-engine 'ghost' cannot be had here: its python /no/such/python is not there"
        in done.text
    )
    planned = workspace.run("plan", "mini")
    assert planned.code == 0
    assert "left out: ghost: its python" in planned.text
