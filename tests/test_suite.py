"""A suite's TOML becomes frozen dataclasses: levels, request counts, limits, overrides."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headway import metrics, suite
from headway.core import Case, Level, Slo
from headway.results import ModelFacts, check_context
from headway.suite import ALWAYS, BaselineGate, Budget, Limit, SuiteError
from headway.workload import Prompts

SHIPPED = Path(__file__).resolve().parent.parent / "perf_tests" / "suites"
SMALL = """
[engine.a]
kind = "fake"
[workload.w]
concurrency = [2]
"""


@pytest.fixture
def load(tmp_path):
    """Return a function from TOML text (and overrides) to a suite."""

    def read(text: str, *overrides: str) -> suite.Suite:
        path = tmp_path / "some.toml"
        path.write_text(text, encoding="utf-8")
        return suite.load(path, overrides)

    return read


def case(engine="a", workload="w", level="c2"):
    return Case(engine, "smollm2_135m", workload, level)


@pytest.mark.parametrize(
    "path",
    sorted([*SHIPPED.glob("*.toml"), *Path(__file__).with_name("suites").glob("*.toml")]),
    ids=lambda path: path.stem,
)
def test_the_shipped_suites_load(path):
    loaded = suite.load(path)
    assert (loaded.name, loaded.path) == (path.stem, str(path))
    assert loaded.description
    assert loaded.launches >= 2
    assert len(loaded.cases()) == len({one.name for one in loaded.cases()})
    gates = {limit.metric for limit in loaded.limits} | set(loaded.baseline.metrics)
    assert gates <= set(metrics.ALL)
    assert set(ALWAYS) <= set(loaded.limits)
    for workload in loaded.workloads:
        for level in workload.levels:
            assert level.num_requests >= 4 * (level.concurrency or 1)


def test_there_are_shipped_suites():
    assert {"smoke", "quick", "gpu"} <= {path.stem for path in SHIPPED.glob("*.toml")}


def test_the_smallest_suite_has_the_documented_defaults(load):
    loaded = load(SMALL)
    (instance,) = loaded.instances
    assert (instance.name, instance.kind) == ("a", "fake")
    assert (instance.model, instance.dtype) == ("smollm2_135m", "float32")
    assert (instance.args, instance.env, instance.python, instance.port) == ({}, {}, None, None)
    (workload,) = loaded.workloads
    assert workload.prompts == Prompts("w", 128, 64, "uniform")
    assert workload.name == "w"
    assert (loaded.seed, loaded.launches, loaded.step_batches) == (1, 2, ())
    assert loaded.baseline == BaselineGate()
    assert loaded.limits == ALWAYS
    assert loaded.cases() == (case(),)
    assert loaded.instance("a") is instance
    assert loaded.workload("w") is workload


def test_everything_that_can_be_said_is_read(load):
    loaded = load(
        """
        [suite]
        description = "d"
        model = "m"
        dtype = "bfloat16"
        seed = 7
        launches = 3
        level_timeout_s = 30.5
        idle_timeout_s = 2
        step_batches = [1, 8]
        wait_quiet_s = 30
        [budget]
        night_minutes = 12
        comparison_cost = 1
        month_minutes = 120
        price_per_hour = 6.0
        [engine.a]
        kind = "x"
        args = { n = 1, s = "t" }
        env = { K = "v" }
        python = "/p"
        port = 81
        start_timeout_s = 5
        [engine."b_0.1"]
        kind = "x"
        model = "other"
        dtype = "float16"
        [workload.w]
        prompts = "recall"
        prompt_tokens = 12
        output_tokens = 3
        concurrency = [1, 2]
        rate_per_s = [0.5, 4]
        arrivals = "burst"
        requests = 700
        [[limit]]
        metric = "ttft_p99"
        engine = "a"
        over = "b_0.1"
        workload = "w"
        level = "c2"
        min = 1
        max = 2.5
        [baseline]
        metrics = ["tpot_p50"]
        tolerance = 0.1
        resolution = 1
        min_launches = 4
        min_nights = 2
        drift_budget = 0.02
        persistence = 2
        arm_within_days = 9
        """
    )
    a, b = loaded.instances
    assert (a.model, a.dtype, a.args, a.env) == ("m", "bfloat16", {"n": 1, "s": "t"}, {"K": "v"})
    assert (a.python, a.port, a.start_timeout_s) == ("/p", 81, 5.0)
    assert (b.name, b.model, b.dtype) == ("b_0.1", "other", "float16")
    assert loaded.workloads[0].prompts == Prompts("w", 12, 3, "recall")
    assert loaded.workloads[0].levels == (
        Level("c1", 700, concurrency=1),
        Level("c2", 700, concurrency=2, fill_s=0.005),
        Level("r0.5", 700, rate_per_s=0.5, arrivals="burst"),
        Level("r4", 700, rate_per_s=4.0, arrivals="burst"),
    )
    assert loaded.limits[0] == Limit("ttft_p99", "a", "b_0.1", "w", "c2", 1.0, 2.5)
    assert loaded.baseline == BaselineGate(("tpot_p50",), 0.1, 1.0, 4, 2, 0.02, 2, 9)
    assert (loaded.description, loaded.seed, loaded.launches) == ("d", 7, 3)
    assert loaded.budget == Budget(12.0, 10.0, 120.0, 6.0)
    assert (loaded.level_timeout_s, loaded.idle_timeout_s, loaded.wait_quiet_s) == (30.5, 2, 30)
    assert loaded.step_batches == (1, 8)
    assert type(loaded.budget.night_minutes) is float


@pytest.mark.parametrize(
    ("gate", "counts"),
    [
        ("output_throughput", {"c1": 4, "c8": 32, "c256": 1024, "r2": 32}),
        ("ttft_p50", {"c1": 11, "c8": 32, "c256": 1024, "r2": 32}),
        ("ttft_p90", {"c1": 64, "c8": 64, "c256": 1024, "r2": 64}),
        ("itl_p99", {"c1": 662, "c8": 662, "c256": 1024, "r2": 662}),
    ],
)
@pytest.mark.parametrize("kind", ["limit", "baseline"])
def test_a_level_has_four_requests_a_slot_and_what_its_gates_need(load, gate, counts, kind):
    tables = (
        f'[[limit]]\nmetric = "{gate}"\nmax = 1\n[baseline]\nmetrics = []'
        if kind == "limit"
        else f'[baseline]\nmetrics = ["{gate}"]'
    )
    text = '[engine.a]\nkind = "x"\n[workload.w]\nconcurrency = [1, 8, 256]\nrate_per_s = [2]\n'
    loaded = load(text + tables)
    assert {level.name: level.num_requests for level in loaded.workloads[0].levels} == counts


def test_a_limit_asks_for_requests_only_where_it_applies(load):
    loaded = load(
        SMALL + "[workload.v]\nconcurrency = [2, 3]\n"
        '[[limit]]\nmetric = "ttft_p99"\nworkload = "v"\nlevel = "c3"\nmax = 1\n'
        "[baseline]\nmetrics = []"
    )
    counts = [(w.name, lv.name, lv.num_requests) for w in loaded.workloads for lv in w.levels]
    assert counts == [("w", "c2", 8), ("v", "c2", 8), ("v", "c3", 662)]


def test_what_was_asked_for_is_kept_when_it_is_enough(load):
    assert load(SMALL, "workload.w.requests=50").workloads[0].levels[0].num_requests == 50


@pytest.mark.parametrize(
    ("limit", "covered"),
    [
        (Limit("m"), {"a", "b"}),
        (Limit("m", engine="a"), {"a"}),
        (Limit("m", engine="c"), set()),
        (Limit("m", over="*"), {"a", "b"}),
        (Limit("m", over="b"), {"a"}),
        (Limit("m", engine="a", over="*"), {"a"}),
        (Limit("m", engine="a", over="a"), set()),
        (Limit("m", workload="w", level="c2"), {"a", "b"}),
        (Limit("m", workload="v"), set()),
        (Limit("m", level="c1"), set()),
    ],
)
def test_a_limit_covers_the_cases_it_names_and_never_compares_with_itself(limit, covered):
    assert {engine for engine in "abx" if limit.covers(case(engine))} - {"x"} == covered


TWO = SMALL + '[engine.b]\nkind = "fake"\n'


def test_requests_must_succeed_with_right_counts_unless_the_suite_says_otherwise(load):
    own = '[[limit]]\nmetric = "success_rate"\nmin = 0.9\n'
    assert load(TWO + own).limits == (Limit("success_rate", min=0.9), ALWAYS[1])


def test_a_limit_for_one_engine_leaves_the_other_its_default(load):
    own = '[[limit]]\nmetric = "success_rate"\nengine = "a"\nmin = 0.9\n'
    limits = [one for one in load(TWO + own).limits if one.metric == "success_rate"]
    assert {one.min for one in limits if one.covers(case("a"))} == {0.9}
    assert {one.min for one in limits if one.covers(case("b"))} == {1.0}


def test_a_ratio_replaces_no_default(load):
    own = '[[limit]]\nmetric = "success_rate"\nover = "*"\nmin = 0.5\n'
    assert set(ALWAYS) <= set(load(TWO + own).limits)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("engine.a.args.slower=0.1", 0.1),
        ("engine.a.args.slower = 0.1", 0.1),
        ("engine.a.args.slower=true", True),
        ("engine.a.args.slower=[1, 2]", [1, 2]),
        ("engine.a.args.slower='x'", "x"),
        ("engine.a.args.slower=bare", "bare"),
        ("engine.a.args.slower=a=b", "a=b"),
        ("engine.a.args.slower=/a path/x", "/a path/x"),
        ("engine.a.args.slower=", ""),
        ('engine."a".args.slower=1', 1),
    ],
)
def test_an_override_is_a_toml_value_or_else_a_string(load, text, value):
    assert load(SMALL, text).instances[0].args == {"slower": value}


def test_an_override_reaches_names_with_dots_and_the_last_one_wins(load):
    text = SMALL.replace("engine.a", 'engine."a_0.1"')
    loaded = load(text, 'engine."a_0.1".dtype=float16', 'engine."a_0.1".dtype=bfloat16')
    assert loaded.instances[0].dtype == "bfloat16"
    assert load(text, "suite.launches=5").launches == 5


def test_an_override_may_add_what_a_suite_needs(load):
    loaded = load(SMALL, "engine.b.kind=fake", "workload.w.concurrency=[2, 4]")
    assert [one.name for one in loaded.cases()] == ["a-w-c2", "a-w-c4", "b-w-c2", "b-w-c4"]


def test_a_suite_is_found_by_name_in_the_first_folder_that_has_it(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.toml").write_text(SMALL)
    (tmp_path / "two" / "smoke.toml").write_text(SMALL)
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "absent"]
    assert suite.find("same", folders) == tmp_path / "one" / "same.toml"
    assert suite.find("smoke", iter(folders)) == tmp_path / "two" / "smoke.toml"
    assert suite.find("some/where.toml", folders) == Path("some/where.toml")
    with pytest.raises(SuiteError, match=r"no suite 'smok'; known: same, smoke \(did you mean sm"):
        suite.find("smok", iter(folders))
    with pytest.raises(SuiteError, match="no suite 'x'; known: none"):
        suite.find("x", [])


def test_a_suite_does_not_change(load):
    loaded = load(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.seed = 2


def test_an_slo_is_on_every_level_of_its_workload(load):
    text = SMALL + "rate_per_s = [1]\nslo = { ttft_s = 0.5, tpot_s = 1 }\n"
    levels = load(text).workloads[0].levels
    assert [level.slo for level in levels] == [Slo(ttft_s=0.5, tpot_s=1.0)] * 2
    assert load(SMALL).workloads[0].levels[0].slo is None


def test_the_level_of_a_case(load):
    loaded = load(SMALL + "[workload.v]\nconcurrency = [2, 3]\nslo = { e2el_s = 9 }\n")
    for one in loaded.cases():
        level = loaded.level(one)
        assert level in loaded.workload(one.workload).levels
        assert level.name == one.level
    assert loaded.level(case(workload="v")).slo == Slo(e2el_s=9.0)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/srv/jane/models/my_model", "my_model"),
        ("/srv/jane/models/my_model/", "my_model"),
        ("~/my_model", "my_model"),
        ("./my_model", "my_model"),
        ("../a/my_model", "my_model"),
        ("/", "model"),
        ("smollm2_135m", "smollm2_135m"),
        ("org/name", "org/name"),
        ("synthetic:qwen2.5_7b", "synthetic:qwen2.5_7b"),
    ],
)
def test_results_name_a_model_without_saying_where_it_lies(load, model, name):
    loaded = load(SMALL, f"suite.model={model!r}")
    assert (loaded.instances[0].model, loaded.instances[0].model_name) == (model, name)
    assert loaded.cases() == (Case("a", name, "w", "c2"),)


def test_a_workload_beyond_a_model_s_context_is_refused_with_the_numbers(load):
    loaded = load(SMALL, "suite.model='/srv/m'")  # 128 prompt and 64 output tokens
    for holds in (191, 1):
        facts = {"m": ModelFacts("m", "r", 100, context_length=holds)}
        with pytest.raises(SuiteError) as caught:
            check_context(loaded, facts)
        assert str(caught.value) == (
            f"{loaded.path}: workload.w has 128 prompt and 64 output tokens, 192 in all; "
            f"the context of m holds {holds}"
        )
    check_context(loaded, {"m": ModelFacts("m", "r", 100, context_length=192)})
    check_context(loaded, {"m": ModelFacts("m", "r", 100)})
    check_context(loaded, {})
