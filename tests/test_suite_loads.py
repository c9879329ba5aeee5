"""What a suite can say of its load: lengths, arrivals, levels, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway import arrivals, codec, outlook, suite
from headway.core import Level, Stage
from headway.lengths import MIXTURES, Lognormal, Part, Trace, Uniform, scaled_part
from headway.results import ModelFacts, check_context
from headway.suite import SuiteError
from headway.workload import Prefix, Prompts, lengths_of

DOCS = Path(__file__).resolve().parent.parent / "docs" / "suites.md"
TOP = '[suite]\nseed = 7\n[engine.a]\nkind = "fake"\n[workload.w]\n'
TRACE = "time_s,prompt_tokens,output_tokens\n5,100,20\n6,40,8\n9,8,4\n"
GATES = "[baseline]\nmetrics = []\n"


@pytest.fixture
def load(tmp_path):
    """Return a function from the keys of a workload to the suite that has it."""
    (tmp_path / "trace.csv").write_text(TRACE)

    def read(keys: str, rest: str = GATES) -> suite.Suite:
        path = tmp_path / "some.toml"
        path.write_text(f"{TOP}{keys}\n{rest}", encoding="utf-8")
        return suite.load(path)

    return read


@pytest.fixture
def refused(load):
    """Return a function from the keys of a workload to the sentence it is refused with."""

    def read(keys: str, rest: str = GATES) -> str:
        with pytest.raises(SuiteError) as caught:
            load(keys, rest)
        message = str(caught.value)
        assert "\n" not in message
        return message.partition(": ")[2]

    return read


def prompts(load, keys):
    return load(f"{keys}\nconcurrency = [1]").workloads[0].prompts


def levels(load, keys):
    return load(keys).workloads[0].levels


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", Prompts("w", 128, 64)),
        ("scale = 0.25", Prompts("w", 32, 16)),
        ("prompt_tokens = { min = 8, max = 64 }", Prompts("w", Uniform(8, 64), 64)),
        (
            "output_tokens = { median = 20, sigma = 0.5, min = 8, max = 64 }\nscale = 2",
            Prompts("w", 256, Lognormal(40.0, 0.5, 16, 128)),
        ),
        ('mix = "five"', Prompts("w", None, None, mix=MIXTURES["five"])),
        (
            "mix = [{ prompt_tokens = 16, output_tokens = 64 }, "
            "{ prompt_tokens = { min = 1, max = 9 }, output_tokens = 4, share = 3 }]",
            Prompts("w", None, None, mix=(Part(16, 64), Part(Uniform(1, 9), 4, 3.0))),
        ),
        ("prefix = { tokens = 512 }", Prompts("w", 128, 64, prefix=Prefix(512))),
        (
            "prefix = { tokens = 512, groups = 4, share = 0.5 }",
            Prompts("w", 128, 64, prefix=Prefix(512, 4, 0.5)),
        ),
        (
            "temperature = 0.7\ntop_p = 0.9\nignore_eos = false",
            Prompts("w", 128, 64, ignore_eos=False, temperature=0.7, top_p=0.9),
        ),
        (
            'replay = "trace.csv"',
            Prompts(
                "w", None, None, trace=Trace("trace.csv", (0.0, 1.0, 4.0), (100, 40, 8), (20, 8, 4))
            ),
        ),
    ],
)
def test_what_is_sent_is_read(load, keys, expected):
    assert prompts(load, keys) == expected


def test_the_five_lengths_fit_a_small_machine(load):
    made = prompts(load, 'mix = "five"\nscale = 0.25')
    assert made.mix == tuple(scaled_part(part, 0.25) for part in MIXTURES["five"])


def test_open_levels_have_the_process_that_was_asked(load):
    two, four = levels(load, 'rate_per_s = [2, 4]\narrivals = "gamma"\nburstiness = 0.5')
    assert two == Level("r2", 32, rate_per_s=2.0, arrivals="gamma", burstiness=0.5)
    assert (four.name, four.rate_per_s) == ("r4", 4.0)
    (constant,) = levels(load, 'rate_per_s = [2]\narrivals = "gamma"\nburstiness = inf')
    assert constant == Level("r2", 32, rate_per_s=2.0, arrivals="constant")


def test_a_ramp_and_stages_are_levels_of_as_many_requests_as_are_drawn(load):
    ramp, stages = levels(
        load,
        "ramp = { from = 1, to = 20, seconds = 60 }\n"
        "stages = [{ rate_per_s = 2, seconds = 30 }, { from = 2, to = 0, seconds = 10.5 }]\n",
    )
    drawn = arrivals.in_stages("poisson", (Stage(1.0, 60.0, 20.0),), 7)
    assert (ramp.name, ramp.num_requests, ramp.rate_per_s) == ("ramp", len(drawn), 10.5)
    assert 500 < len(drawn) < 760  # 630 expected, a standard deviation of 25
    assert stages.stages == (Stage(2.0, 30.0), Stage(2.0, 10.5, 0.0))
    assert stages.rate_per_s == pytest.approx(70.5 / 40.5)
    for level in (ramp, stages):
        for launch in (1, 2):
            assert len(arrivals.schedule(level, 7, launch)) == level.num_requests


def test_a_trace_is_a_level_for_each_speed(load):
    keys = 'replay = "trace.csv"\nreplay_speed = [1, 2, 0.5]\nconcurrency = [2]'
    made = levels(load, keys)
    assert [level.name for level in made] == ["c2", "replay", "replay_x2", "replay_x0.5"]
    closed, *replayed = made
    assert closed.num_requests == 8
    assert [(lv.num_requests, lv.arrivals, lv.speed) for lv in replayed] == [
        (3, "replay", 1.0),
        (3, "replay", 2.0),
        (3, "replay", 0.5),
    ]
    assert [level.rate_per_s for level in replayed] == [0.75, 1.5, 0.375]
    (only,) = levels(load, 'replay = "trace.csv"')
    assert only.name == "replay"
    (lengths_only,) = levels(load, 'replay = "trace.csv"\nreplay_speed = []\nconcurrency = [2]')
    assert lengths_only == closed


def test_a_trace_of_one_moment_has_no_rate(load, tmp_path):
    (tmp_path / "at_once.jsonl").write_text(
        '{"time_s": 3, "prompt_tokens": 4, "output_tokens": 5}\n' * 3
    )
    (level,) = levels(load, 'replay = "at_once.jsonl"')
    assert (level.num_requests, level.rate_per_s, level.closed) == (3, None, False)
    trace = load('replay = "at_once.jsonl"').workloads[0].prompts.trace
    assert arrivals.schedule(level, 7, 1, trace) == (0.0, 0.0, 0.0)


def test_slots_are_filled_over_a_short_time_unless_a_suite_says_otherwise(load):
    filled = [level.fill_s for level in levels(load, "concurrency = [1, 8, 1024]")]
    assert filled == pytest.approx([0.0, 0.035, 1.0])
    assert [lv.fill_s for lv in levels(load, "concurrency = [1, 8]\nfill_s = 2")] == [0.0, 2.0]
    assert [lv.fill_s for lv in levels(load, "concurrency = [8]\nfill_s = 0")] == [0.0]


def test_a_suite_with_a_trace_survives_its_journal(load):
    loaded = load(
        'replay = "trace.csv"\nramp = { from = 1, to = 20, seconds = 60 }\narrivals = "gamma"\n'
        "burstiness = 2\nprefix = { tokens = 4 }\n"
        '[workload.v]\nmix = "five"\nconcurrency = [1]\n'
        "[workload.u]\nprompt_tokens = { median = 9, sigma = 1, min = 1, max = 99 }\n"
        "concurrency = [1]"
    )
    assert codec.decode(suite.Suite, codec.encode(loaded)) == loaded


def test_the_longest_request_must_fit_the_context(load):
    facts = {"smollm2_135m": ModelFacts("smollm2_135m", "r", 100, context_length=300)}
    keys = "concurrency = [1]\nprefix = { tokens = 80 }\n"
    keys += "prompt_tokens = { min = 1, max = 200 }\noutput_tokens = { min = 1, max = %d }"
    check_context(load(keys % 20), facts)
    with pytest.raises(SuiteError, match="has 280 prompt and 21 output tokens, 301 in all"):
        check_context(load(keys % 21), facts)


def test_the_plan_says_lengths_hit_rate_and_what_is_not_verified(load):
    loaded = load(
        'mix = "five"\nscale = 0.25\nprefix = { tokens = 64, groups = 2, share = 0.5 }\n'
        "temperature = 0.7\nrate_per_s = [2]\nrequests = 40"
    )
    text = outlook.describe(loaded, outlook.Known())
    assert "20% 4 prompt and 16 to 64 output, 20% 16 prompt" in text
    assert "50% of prompts have one of 2 shared prefixes of 64 tokens before them" in text
    assert "40 requests, 1" in text
    assert "% of prompt tokens in a perfect cache" in text
    assert "sampled at temperature 0.7: outputs are not verified" in text
    tokens = sum(output for _, output in lengths_of(loaded.workloads[0].prompts, 40, 7))
    minutes = 2 * (10 + tokens / 20) / 60
    assert f"every night about {minutes:.0f} minutes" in text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("prompt_tokens = { min = 8 }", "prompt_tokens.max is missing; a length is a number, "),
        ("prompt_tokens = {}", "prompt_tokens.min is missing; a length is a number, { min, max } "),
        (
            "prompt_tokens = { median = 9, min = 1, max = 20 }",
            "prompt_tokens.sigma is missing; a length is a number, { min, max } or ",
        ),
        (
            "prompt_tokens = { min = 9, max = 8 }",
            "prompt_tokens has min 9 above max 8",
        ),
        (
            "output_tokens = { median = 90, sigma = 1, min = 1, max = 20 }",
            "output_tokens.median is 90; it must lie from 1 to 20",
        ),
        ("prompt_tokens = { min = 0, max = 8 }", "prompt_tokens.min is 0; it must be above 0"),
        ('prompt_tokens = "9"', "prompt_tokens is '9'; it must be a whole number"),
        ("prompt_tokens = { mean = 8 }", "prompt_tokens.mean is not known; allowed: max, "),
        ('mix = "six"', "mix is 'six'; allowed: five"),
        ("mix = []", "mix is []; it must be 'five', or a list of tables"),
        ("mix = [{ prompt_tokens = 3 }]", "mix[0].output_tokens is missing"),
        (
            "mix = [{ prompt_tokens = 3, output_tokens = 3, share = 0 }]",
            "mix[0].share is 0.0; it must be above 0",
        ),
        ('mix = "five"\nprompt_tokens = 3', "has mix and prompt_tokens: one of them says how "),
        ('mix = "five"\nreplay = "trace.csv"', "has mix and replay: one of them says how long "),
        ("scale = 0", "scale is 0.0; it must be above 0"),
        ("prefix = {}", "prefix.tokens is missing"),
        ("prefix = { tokens = 4, share = 1.5 }", "prefix.share is 1.5; it must be at most 1"),
        ("prefix = { tokens = 4, groups = 0 }", "prefix.groups is 0; it must be above 0"),
        ('prompts = "recall"\nprefix = { tokens = 4 }', "prefix cannot stand before recall "),
        (
            'prompts = "recall"\nmix = "five"\nscale = 0.1',
            "prompts has prompts of 2; recall prompts have at least 12",
        ),
        ("temperature = -1", "temperature is -1.0; it must be 0 or above"),
        ("top_p = 0.9", "top_p means nothing without a temperature above 0: outputs are greedy"),
        ("temperature = 1\ntop_p = 1.1", "top_p is 1.1; it must be at most 1"),
        ("fill_s = -1", "fill_s is -1.0; it must be 0 or above"),
        ("burstiness = 2", "burstiness is of arrivals = 'gamma'; they are 'poisson' here"),
        ('arrivals = "gamma"', "burstiness is missing: 1 is Poisson, less is burstier, inf is "),
        *(
            (
                f'arrivals = "gamma"\nburstiness = {value}',
                "burstiness is",
            )
            for value in ("0", "-1", "nan", "true", '"1"')
        ),
        ("ramp = 3", "ramp is 3; it must be a table { from, "),
        ("ramp = { from = 1, to = 2 }", "ramp.seconds is missing; a stage has from, to, seconds"),
        ("ramp = { rate_per_s = 1, seconds = 2 }", "ramp.rate_per_s is not known; allowed: from, "),
        ("ramp = { from = -1, to = 2, seconds = 2 }", "ramp.from is -1.0; it must be 0 or above"),
        ("ramp = { from = 0, to = 0, seconds = 2 }", "ramp makes no request as the seed 7 draws "),
        ("ramp = { from = 1e9, to = 1e9, seconds = 9 }", "ramp makes about 9e+09 requests; at "),
        ("ramp = { from = 1, to = 1, seconds = 9999 }", "ramp lasts 99"),
        ("ramp = { from = 1, to = nan, seconds = 9 }", "ramp.to is nan; it must be a finite "),
        ("stages = []", "stages is []; it must be a list of tables "),
        ("stages = [{ seconds = 3 }]", "stages[0].from is missing; a stage has from, to, seconds"),
        ("stages = [{ rate_per_s = 1, seconds = 0 }]", "stages[0].seconds is 0.0; it must be ab"),
        ('replay = "none.csv"', "none.csv cannot be read"),
        ("replay_speed = [2]", "replay_speed needs replay: it is how fast that is sent"),
        ('replay = "trace.csv"\nreplay_speed = [0]', "replay_speed is [0]; it must be a list of "),
        ('replay = "trace.csv"\nrequests = 3\n', "requests is for no level: ramp, stages and "),
    ],
)
def test_a_load_that_cannot_be_is_refused(refused, keys, message):
    closed = (
        "" if keys.startswith(("ramp", "stages")) or "requests" in keys else "concurrency = [1]"
    )
    said = refused(f"{keys}\n{closed}")
    if message == "none.csv cannot be read":
        assert said.startswith("No such file")
    else:
        where = "workload.w " if message.startswith("has ") else "workload.w."
        assert said.startswith(f"{where}{message}"), said


def test_a_level_too_short_for_its_gates_is_refused(refused):
    gate = '[baseline]\nmetrics = ["ttft_p99"]\n'
    said = refused("stages = [{ rate_per_s = 1, seconds = 20 }]", gate)
    assert said.startswith("workload.w.stages makes ")
    assert "requests; the gate on ttft_p99 needs at least" in said


def test_case_21_a_burstiness_that_is_none_names_what_would_be_right(refused):
    said = refused('arrivals = "gamma"\nburstiness = nan\nrate_per_s = [1]')
    assert said == "workload.w.burstiness is nan; it must be a number, at least 0.001"


def test_the_documented_examples_can_be_measured(tmp_path):
    (example,) = re.findall(r"^```toml\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.M | re.S)
    rows = "".join(f"{at},64,16\n" for at in range(40))
    (tmp_path / "trace.csv").write_text(f"time_s,prompt_tokens,output_tokens\n{rows}")
    path = tmp_path / "docs.toml"
    path.write_text(f'[engine.a]\nkind = "fake"\n{example}')
    loaded = suite.load(path)
    assert all(level.num_requests for w in loaded.workloads for level in w.levels)
    names = {level.name for w in loaded.workloads for level in w.levels}
    assert {"c8", "r2", "ramp", "stages", "replay", "replay_x2"} <= names
