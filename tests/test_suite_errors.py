"""Whatever is wrong with a suite is said in one sentence: file, key, value, what is allowed."""

from __future__ import annotations

import re

import pytest

from headway import suite

SMALL = """
[engine.a]
kind = "fake"
[engine.b]
kind = "fake"
[workload.w]
concurrency = [2]
"""


@pytest.fixture
def refused(tmp_path):
    """Return a function from TOML text (and overrides) to the sentence it is refused with."""

    def read(text: str, *overrides: str, name: str = "some.toml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        with pytest.raises(suite.SuiteError) as caught:
            suite.load(path, overrides)
        message = str(caught.value)
        assert "\n" not in message
        return message.replace(str(path), "FILE")

    return read


ALLOWED_AT_TOP = "baseline, budget, engine, equal, limit, reference, suite, workload"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engin.a.kind=x", f"engin is not known; allowed: {ALLOWED_AT_TOP} (did you mean engine?)"),
        ("zzz=1", f"zzz is not known; allowed: {ALLOWED_AT_TOP}"),
        (
            "suite.lanches=3",
            "suite.lanches is not known; allowed: calibrate, description, dtype, "
            "idle_timeout_s, launches, level_timeout_s, load_workers, model, pin, replay_inside, "
            "seed, step_batches, wait_quiet_s, warmup_timeout_s (did you mean launches?)",
        ),
        (
            "engine.a.arg={}",
            "engine.a.arg is not known; allowed: api_key_env, args, base_url, dtype, env, gpus, "
            "image, kind, model, optional, port, python, reference, source, start_timeout_s, "
            "tuning (did you mean args?)",
        ),
        (
            "workload.w.output_token=3",
            "workload.w.output_token is not known; allowed: arrivals, burstiness, concurrency, "
            "fill_s, ignore_eos, mix, output_tokens, prefix, prompt_tokens, prompts, ramp, "
            "rate_per_s, replay, replay_speed, requests, requests_file, scale, send, slo, stages, "
            "temperature, think_s, top_p, turns "
            "(did you mean output_tokens?)",
        ),
        (
            "baseline.min_night=3",
            "baseline.min_night is not known; allowed: arm_within_days, drift_budget, metrics, "
            "min_launches, min_nights, persistence, resolution, tolerance "
            "(did you mean min_nights?)",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_known_ones(refused, override, message):
    assert refused(SMALL, override) == f"FILE: {message}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("suite=3", "suite is 3; it must be a table"),
        ("engine=3", "engine is 3; it must be a table"),
        ("engine.a=3", "engine.a is 3; it must be a table"),
        ("workload.w=[1]", "workload.w is [1]; it must be a table"),
        ("baseline=1", "baseline is 1; it must be a table"),
        ("suite.seed=true", "suite.seed is True; it must be a whole number"),
        ("suite.seed=1.5", "suite.seed is 1.5; it must be a whole number"),
        ("suite.launches=true", "suite.launches is True; it must be a whole number"),
        ("suite.launches=0", "suite.launches is 0; it must be above 0"),
        ("suite.launches=two", "suite.launches is 'two'; it must be a whole number"),
        ("budget.night_minutes=true", "budget.night_minutes is True; it must be a number"),
        ("budget.night_minutes=nan", "budget.night_minutes is nan; it must be a finite number"),
        ("suite.idle_timeout_s=inf", "suite.idle_timeout_s is inf; it must be a finite number"),
        ("suite.level_timeout_s=-1", "suite.level_timeout_s is -1.0; it must be above 0"),
        ("suite.description=3", "suite.description is 3; it must be a string"),
        ("suite.model=3", "suite.model is 3; it must be a string"),
        ("suite.step_batches=3", "suite.step_batches is 3; it must be a list"),
        ("suite.step_batches=[0]", "suite.step_batches is [0]; it must be whole numbers > 0"),
        (
            "suite.step_batches=[true]",
            "suite.step_batches is [True]; it must be whole numbers > 0",
        ),
        ("engine.a.kind=3", "engine.a.kind is 3; it must be a string"),
        ("engine.a.args=3", "engine.a.args is 3; it must be a table"),
        ("engine.a.env={X = 3}", "engine.a.env must hold strings only"),
        ("engine.a.port=0", "engine.a.port is 0; it must be above 0"),
        ("engine.a.port=65536", "engine.a.port is 65536; it must be at most 65535"),
        ("engine.a.port=true", "engine.a.port is True; it must be a whole number"),
        ("engine.a.start_timeout_s=0", "engine.a.start_timeout_s is 0.0; it must be above 0"),
        ("workload.w.prompt_tokens=0", "workload.w.prompt_tokens is 0; it must be above 0"),
        (
            "workload.w.output_tokens=1.0",
            "workload.w.output_tokens is 1.0; it must be a whole number",
        ),
        ("workload.w.requests=0", "workload.w.requests is 0; it must be above 0"),
        ("baseline.metrics=tpot", "baseline.metrics is 'tpot'; it must be a list"),
        ("baseline.metrics=[1]", "baseline.metrics is [1]; it must be a list of names"),
        ("baseline.tolerance=0", "baseline.tolerance is 0.0; it must be above 0"),
        ("baseline.tolerance=0.049", "baseline.tolerance is 0.049; never tighter than 0.05"),
        ("workload.w.slo=3", "workload.w.slo is 3; it must be a table"),
        ("workload.w.slo.ttft_s=0", "workload.w.slo.ttft_s is 0.0; it must be above 0"),
        ("workload.w.slo.ttft_s=fast", "workload.w.slo.ttft_s is 'fast'; it must be a number"),
        (
            "workload.w.slo={}",
            "workload.w.slo is empty; it holds one or more of ttft_s, tpot_s, e2el_s",
        ),
        (
            "workload.w.slo.ttf_s=1",
            "workload.w.slo.ttf_s is not known; allowed: e2el_s, tpot_s, ttft_s "
            "(did you mean ttft_s?)",
        ),
        (
            "engine={a = {kind='x', model='/p/m'}, b = {kind='x', model='/q/m'}}",
            "engine.b.model is '/q/m', which results would not tell from '/p/m'",
        ),
        ("limit=3", "limit must be written [[limit]], one table each"),
        ("limit=[3]", "limit must be written [[limit]], one table each"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_quoted_with_what_is_allowed(refused, override, message):
    assert refused(SMALL, override) == f"FILE: {message}"


NUMBERS = "it must be a list of distinct numbers above 0"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.a.dtype=fp8", "engine.a.dtype is 'fp8'; allowed: float32, bfloat16, float16"),
        ("suite.dtype=fp8", "suite.dtype is 'fp8'; allowed: float32, bfloat16, float16"),
        ("workload.w.prompts=chat", "workload.w.prompts is 'chat'; allowed: uniform, recall"),
        (
            "workload.w.arrivals=weibull",
            "workload.w.arrivals is 'weibull'; allowed: poisson, gamma, constant, burst",
        ),
        ("workload.w.concurrency=8", f"workload.w.concurrency is 8; {NUMBERS}"),
        ("workload.w.concurrency=[0]", f"workload.w.concurrency is [0]; {NUMBERS}"),
        ("workload.w.concurrency=[true]", f"workload.w.concurrency is [True]; {NUMBERS}"),
        ("workload.w.concurrency=[2, 2]", f"workload.w.concurrency is [2, 2]; {NUMBERS}"),
        ("workload.w.concurrency=[[2]]", f"workload.w.concurrency is [[2]]; {NUMBERS}"),
        ("workload.w.rate_per_s=[nan]", f"workload.w.rate_per_s is [nan]; {NUMBERS}"),
        ("workload.w.rate_per_s=[inf]", f"workload.w.rate_per_s is [inf]; {NUMBERS}"),
        ("workload.w.rate_per_s=['1']", f"workload.w.rate_per_s is ['1']; {NUMBERS}"),
        (
            "workload.w.concurrency=[1.5]",
            "workload.w.concurrency holds 1.5; whole numbers only",
        ),
        (
            "workload.w.rate_per_s=[1, 1.0000001]",
            "workload.w has two levels with the name r1",
        ),
        (
            "workload.w.rate_per_s=[0.00001]",
            "workload.w.rate_per_s holds 'r1e-05'; names use a-z, 0-9, _ and . only",
        ),
        (
            "workload.w.concurrency=[]",
            "workload.w has none of concurrency, rate_per_s, ramp, stages, replay: it selects "
            "nothing",
        ),
        ("engine={}", "[engine.NAME] is missing: the suite selects nothing"),
        ("workload={}", "[workload.NAME] is missing: the suite selects nothing"),
        ("engine.c={}", "engine.c.kind is missing"),
        (
            "engine.my-vllm.kind=x",
            "engine.my-vllm holds 'my-vllm'; names use a-z, 0-9, _ and . only",
        ),
        ("workload.W.concurrency=[1]", "workload.W holds 'W'; names use a-z, 0-9, _ and . only"),
        (
            "workload.w.requests=7",
            "workload.w.requests is 7; concurrency 2 needs at least 8 (4 a slot)",
        ),
        (
            "workload.w.requests=10",
            "workload.w.requests is 10; the gate on ttft_p50 needs at least 11 requests a level",
        ),
        (
            "workload.w={prompts='recall', prompt_tokens=11, concurrency=[1]}",
            "workload.w.prompt_tokens is 11; recall prompts have at least 12",
        ),
    ],
)
def test_a_suite_that_cannot_be_measured_is_refused(refused, override, message):
    assert refused(SMALL, override) == f"FILE: {message}"


@pytest.mark.parametrize("load", ["concurrency = [8]", "rate_per_s = [2]"])
@pytest.mark.parametrize(
    "gate", ['[[limit]]\nmetric = "ttft_p99"\nmax = 0.5', '[baseline]\nmetrics = ["ttft_p99"]']
)
def test_a_percentile_that_the_requests_cannot_carry_is_refused_with_the_number(
    refused, load, gate
):
    text = f'[engine.a]\nkind = "x"\n[workload.w]\nrequests = 661\n{load}\n{gate}'
    assert refused(text) == (
        "FILE: workload.w.requests is 661; the gate on ttft_p99 needs at least 662 requests a level"
    )


ENGINES = "allowed: a, b"


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("max = 1", "limit[0].metric is missing"),
        ('metric = "m"', "limit[0] has neither min nor max: it limits nothing"),
        ('metric = "m"\nmin = 2\nmax = 1', "limit[0] has min 2 above max 1: nothing can meet it"),
        ('metric = "m"\nmin = "1"', "limit[0].min is '1'; it must be a number"),
        ('metric = "m"\nmin = true', "limit[0].min is True; it must be a number"),
        ('metric = "m"\nmin = nan', "limit[0].min is nan; it must be a finite number"),
        ('metric = "m"\nmax = inf', "limit[0].max is inf; it must be a finite number"),
        ("metric = 3\nmin = 1", "limit[0].metric is 3; it must be a string"),
        (
            'metric = "slo_attainment"\nmin = 1',
            "limit[0].min is 1; it must lie between 0 and 1: no number of requests shows all",
        ),
        ('metric = "m"\nmin = 1\nengine = "c"', f"limit[0].engine is 'c'; {ENGINES}"),
        ('metric = "m"\nmin = 1\nengine = 3', "limit[0].engine is 3; it must be a string"),
        ('metric = "m"\nmin = 1\nover = "c"', f"limit[0].over is 'c'; {ENGINES}, *"),
        ('metric = "m"\nmin = 1\nworkload = "v"', "limit[0].workload is 'v'; allowed: w"),
        ('metric = "m"\nmin = 1\nlevel = "c4"', "limit[0].level is 'c4'; allowed: c2"),
        (
            'metric = "m"\nmin = 1\nengin = "a"',
            "limit[0].engin is not known; allowed: engine, level, max, metric, min, over, "
            "workload (did you mean engine?)",
        ),
        (
            'metric = "m"\nmin = 1\nengine = "a"\nover = "a"',
            "limit[0] on m covers no case: it limits nothing",
        ),
    ],
)
def test_a_limit_that_limits_nothing_is_refused(refused, limit, message):
    assert refused(f"{SMALL}[[limit]]\n{limit}") == f"FILE: {message}"


def test_a_limit_on_a_level_of_another_workload_is_refused(refused):
    text = SMALL + '[workload.v]\nconcurrency = [3]\n[[limit]]\nmetric = "m"\nmin = 1\n'
    text += '[[limit]]\nmetric = "m"\nmin = 1\nworkload = "w"\nlevel = "c3"'
    assert refused(text) == "FILE: limit[1] on m covers no case: it limits nothing"


def test_a_ratio_over_all_others_needs_another(refused):
    text = '[engine.a]\nkind = "x"\n[workload.w]\nconcurrency = [2]\n'
    text += '[[limit]]\nmetric = "m"\nover = "*"\nmin = 1'
    assert refused(text) == "FILE: limit[0].over is '*' in a suite of one engine: nothing to hold"


def test_a_file_name_with_a_dash_is_refused(refused):
    assert refused(SMALL, name="my-suite.toml") == (
        "FILE: the file name holds 'my-suite'; names use a-z, 0-9, _ and . only"
    )


@pytest.mark.parametrize("text", ["[engine", "a = ", "a = 1\na = 2", "= 3"])
def test_what_is_no_toml_is_refused(refused, text):
    assert refused(text).startswith("FILE is not TOML: ")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "some.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(suite.SuiteError, match=r"is not TOML: .*utf-8"):
        suite.load(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path, reason in ((tmp_path / "no.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(suite.SuiteError, match=re.escape(f"{path} cannot be read: {reason}")):
            suite.load(path)


@pytest.mark.parametrize(
    "text", ["", "x", "=1", " =1", "a..b=1", ".a=1", "#a=1", "a b=1", "[a]=1", "a=1\nb=2", '"a=1']
)
def test_an_override_that_is_none_is_refused_with_an_example(refused, text):
    assert refused(SMALL, text) == (
        f"--headway-set {text!r} must look like engine.NAME.args.slower=0.1"
    )


@pytest.mark.parametrize("text", ["engine.a.kind.x=1", "workload.w.concurrency.x=1"])
def test_an_override_below_what_is_no_table_is_refused(refused, text):
    parent = text.split(".")[2]
    assert refused(SMALL, text) == f"--headway-set {text!r}: {parent} is not a table of the suite"


def test_an_override_is_checked_like_the_file(refused):
    assert refused(SMALL, "engine.typo.args.slower=0.1") == "FILE: engine.typo.kind is missing"
