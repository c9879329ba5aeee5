"""`headway ab`: what it makes of two arms, and that it tells slower from equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import suite, tables, versus
from headway.suite import SuiteError
from headway.versus import Asked

SUITE = """
[suite]
model = "fake"
seed = 3
launches = 4
[engine.x]
kind = "fake"
port = 81
args = { itl_s = 0.010, ttft_s = 0.05 }
[engine.y]
kind = "fake"
[workload.w]
concurrency = [1, 8]
rate_per_s = [2]
[workload.v]
concurrency = [4]
[[limit]]
metric = "ttft_p50"
max = 0.001
[reference]
metrics = ["tpot_p50"]
[budget]
price_per_hour = 3.0
"""


@pytest.fixture
def derive(tmp_path: Path) -> Any:
    base = tmp_path / "base.toml"
    base.write_text(SUITE.replace("[reference]\n", "").replace('metrics = ["tpot_p50"]\n', ""))

    def make(a: str, b: str, **more: Any) -> suite.Suite:
        name, text = versus.derive(base, Asked(a, b, **more))
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return suite.load(path)

    return make


def test_two_engines_of_a_suite_and_nothing_else(derive: Any) -> None:
    made = derive("x", "y")
    assert [(i.name, i.kind, i.port) for i in made.instances] == [
        ("x", "fake", None),
        ("y", "fake", None),
    ]
    gate = made.reference
    assert (gate.instance, gate.candidates) == ("x", ("y",))
    assert gate.first_pairs == gate.max_pairs == made.launches == 16
    assert gate.prime
    assert made.baseline.metrics == ()
    assert {limit.metric for limit in made.limits} == {"success_rate", "token_accuracy"}
    assert made.seed == 3
    assert made.budget.price_per_hour == 3.0


@pytest.mark.parametrize(
    ("a", "b", "of"),
    [("x", "x:itl_s=0.02", None), ("", "itl_s=0.02", "x"), ("x:", "x: itl_s=0.02,", None)],
)
def test_two_settings_of_one_engine(derive: Any, a: str, b: str, of: str | None) -> None:
    first, second = derive(a, b, engine=of).instances
    assert (first.name, second.name) == ("x_a", "x_b")
    assert first.args == {"itl_s": 0.010, "ttft_s": 0.05}
    assert second.args == {"itl_s": 0.02, "ttft_s": 0.05}


def test_an_engine_at_another_commit(derive: Any) -> None:
    old, new = derive("x:git:HEAD~1", "x:seed=4").instances
    assert (old.source, new.source) == ("git:HEAD~1", None)
    old, new = derive("git:v1.0 seed=2", "", engine="x").instances
    assert (old.source, old.args["seed"], new.source) == ("git:v1.0", 2, None)


def test_values_are_read_as_in_a_suite(derive: Any) -> None:
    _, made = derive("x", "x:a=1 b=0.5, c=true d=word e=[1, 2] f='two words'").instances
    wanted = {"a": 1, "b": 0.5, "c": True, "d": "word", "e": [1, 2], "f": "two words"}
    assert {key: made.args[key] for key in wanted} == wanted


def test_only_the_levels_asked_for(derive: Any) -> None:
    made = derive("x", "y", levels=("c8", "r2"))
    assert [(w.name, [lv.name for lv in w.levels]) for w in made.workloads] == [("w", ["c8", "r2"])]


LOADS = """
[engine.x]
kind = "fake"
[workload.w]
replay = "trace.csv"
replay_speed = [1, 2]
ramp = { from = 1, to = 9, seconds = 10 }
stages = [{ rate_per_s = 5, seconds = 10 }]
concurrency = [4]
[workload.v]
ramp = { from = 1, to = 9, seconds = 10 }
"""


@pytest.mark.parametrize(
    ("levels", "made"),
    [
        ((), {"w": ["c4", "ramp", "stages", "replay", "replay_x2"], "v": ["ramp"]}),
        (("ramp",), {"w": ["ramp"], "v": ["ramp"]}),
        (("c4", "replay_x2"), {"w": ["c4", "replay_x2"]}),
        (("stages",), {"w": ["stages"]}),
    ],
)
def test_levels_of_every_kind_are_chosen_and_a_trace_is_found(
    tmp_path: Path, levels: tuple[str, ...], made: dict[str, list[str]]
) -> None:
    base, elsewhere = tmp_path / "suites" / "base.toml", tmp_path / "reports" / "made.toml"
    for path in (base, elsewhere):
        path.parent.mkdir()
    base.write_text(LOADS)
    row = "{at},8,4\n"
    text = "time_s,prompt_tokens,output_tokens\n" + "".join(row.format(at=k) for k in range(40))
    (base.parent / "trace.csv").write_text(text)
    _, derived = versus.derive(base, Asked("x", "x:itl_s=0.02", levels=levels))
    elsewhere.write_text(derived)
    loaded = suite.load(elsewhere)
    assert {w.name: [lv.name for lv in w.levels] for w in loaded.workloads} == made


@pytest.mark.parametrize(
    ("more", "pairs", "minutes"),
    [
        ({"pairs": 6}, 6, 60.0),
        ({"budget": "10m"}, versus.MOST_PAIRS, 10.0),
        ({"budget": "90s", "sensitivity": "5%"}, versus.MOST_PAIRS, 1.5),
        ({"sensitivity": "1.5%"}, 24, 60.0),
    ],
)
def test_pairs_or_a_budget(derive: Any, more: dict[str, Any], pairs: int, minutes: float) -> None:
    made = derive("x", "y", **more)
    assert (made.launches, made.budget.night_minutes) == (pairs, minutes)


@pytest.mark.parametrize(
    ("a", "b", "more", "says"),
    [
        ("x", "z", {}, "'z' names no engine of the suite; known: x, y"),
        ("", "", {"engine": "z"}, "there is no engine 'z'; known: x, y"),
        ("x", "x:what", {}, "'what' must look like key=value, or git:REV"),
        ("x", "y", {"levels": ("c9",)}, "no workload has a level c9"),
        ("x", "y", {"budget": "ten"}, "--budget 'ten' must look like 90s, 10m or 1h"),
        ("x", "y", {"budget": "0m"}, "must look like"),
        ("x", "y", {"sensitivity": "2%"}, "--sensitivity '2%'; allowed: 5%, 3%, 1.5%"),
        ("x", "y", {"pairs": 2}, "reference.first_pairs is 2; at least 4"),
    ],
)
def test_refusals(derive: Any, a: str, b: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(SuiteError) as caught:
        derive(a, b, **more)
    assert says in str(caught.value)


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**31), 2**31)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abz_- ", max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abcxyz_.-", min_size=1, max_size=8), VALUES, max_size=4))
def test_what_is_written_reads_back(table: dict[str, Any]) -> None:
    import tomllib

    assert tomllib.loads(tables.write(table)) == table


SETTINGS = ("--suite", "mini", "--level", "c2", "--set", "suite.calibrate=false", "--fresh")


def test_through_the_command_equal_is_equal_and_slower_is_found(workspace: Any) -> None:
    """Few pairs, far apart: what a person tries first."""
    same = workspace.run("ab", "fake_a", "fake_b", "--pairs", "4", *SETTINGS)
    assert same.code == 0, same.text
    assert not same.cells("REGRESSION", "IMPROVEMENT")
    slower = workspace.run("ab", "fake_a", "fake_b:slower=0.5", "--pairs", "4", *SETTINGS)
    assert slower.code == 1, slower.text
    assert ("fake_b", "tpot_p50") in slower.cells("REGRESSION")
    assert not [name for name, _ in slower.cells("REGRESSION") if name == "fake_a"]
    (primed,) = {r["attempt"] for r in slower.journal("launch") if r["launch"] == 0}
    assert primed == 1
    faster = workspace.run("ab", "fake_a:slower=0.5", "fake_a", "--pairs", "4", *SETTINGS)
    assert faster.code == 0, faster.text
    assert ("fake_a_b", "tpot_p50") in faster.cells("IMPROVEMENT")


def test_a_budget_that_cannot_decide_says_what_would(workspace: Any) -> None:
    # Equal engines: on a quiet machine four pairs already show a change of a few percent.
    done = workspace.run("ab", "fake_a", "fake_b", "--budget", "12s", *SETTINGS)
    assert done.code == 0, done.text
    waits = [c for c in done.report()["cells"] if c["verdict"] == "INCONCLUSIVE"]
    assert waits
    message = next(
        c["message"] for c in waits if (c["instance"], c["metric"]) == ("fake_b", "tpot_p50")
    )
    assert "budget of 0.2 minutes was spent" in message
    assert "pairs would show a change of 3.0%" in message
