"""No Run finds another's prompts in the prefix cache: on a server that has one, and on those whose
salt or reset does nothing."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import codec, loadgen, metrics, night, prefix_cache, suite, verdict
from headway.core import Capabilities, EngineInfo, Request
from headway.engines import servers
from headway.engines.fake import FakePlan
from headway.engines.launcher import Launcher
from headway.night import Night
from headway.report import table
from headway.report.document import document, parse
from headway.report.terminal import terminal
from headway.transport import Target
from headway.verdict import memory

virtual = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("virtual_run.py"))))
SERVER = Path(__file__).with_name("odd_server.py")
SUITE = """
[suite]
model = "fake"
launches = 1
idle_timeout_s = 5
calibrate = false
[engine.odd]
kind = "odd"
args = {args}
[workload.w]
prompt_tokens = 40
output_tokens = 4
concurrency = [1, 2]
requests = 8
{more}
[baseline]
metrics = []
"""
FIELDS = {"return_token_ids": True, "repetition_penalty": 1.0}
SALTED = Capabilities(cached_tokens=True, fields=FIELDS, salt="cache_salt")
Begin = Callable[..., Night]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, night_of: Begin) -> Begin:
    """Begin a night on a server of kind `odd`, which does as its arguments say."""

    def make(
        can: Capabilities = SALTED, reset: str | None = None, more: str = "", **args: Any
    ) -> Night:
        info = EngineInfo("odd", "1", "fake", "float32", "cpu")
        launcher = Launcher(
            lambda spec, port: [
                sys.executable,
                str(SERVER),
                str(port),
                json.dumps(dict(spec.args)),
            ],
            lambda endpoint: info,
            can,
            reset=reset,
        )
        monkeypatch.setattr(servers, "LAUNCHERS", {"odd": launcher})
        given_args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
        path = tmp_path / "apart.toml"
        path.write_text(SUITE.format(args=f"{{ {given_args} }}", more=more))
        return night_of(suite.load(path), fresh=True)

    return make


def measure(made: Night) -> Night:
    made.expect(made.suite.cases())
    planned = night.order(made.suite)[0]
    live = night.LiveLaunch(made, planned)
    try:
        for case in planned.cases:  # once each: what is invalid is not tried again here
            if live._start():
                live._measure_case(case)
    finally:
        live.stop()
    return made


def mixed(made: Night) -> list[bool]:
    """Whether each Run is said to have found another's prompts."""
    said = ("prompt tokens came from a prefix cache", "the prefix cache was not emptied")
    return [any(s in one for one in run.invalid for s in said) for run in made.results.runs]


def shares(made: Night) -> list[float | None]:
    return [metrics.cached_share(run) for run in made.results.runs]


def test_each_run_has_a_salt_of_its_own(begin: Begin) -> None:
    made = measure(begin())
    assert (mixed(made), shares(made)) == ([False, False], [0.0, 0.0])
    (launch,) = made.results.launches
    assert launch.can == SALTED
    assert launch.notices == ()


# 40 prompt tokens hold two blocks of 16.
IGNORES_SALT = {"salted": False, "ids": True}


def test_a_salt_that_is_ignored_is_noticed_and_what_it_does_is_invalid(begin: Begin) -> None:
    made = measure(begin(**IGNORES_SALT))
    first, second = made.results.runs
    assert mixed(made) == [False, True]
    assert "256 of 320 prompt tokens came from a prefix cache" in second.invalid[0]
    (launch,) = made.results.launches
    assert launch.can is not None
    assert launch.can.salt is None
    assert "cache_salt is accepted, yet 32 prompt tokens were cached" in launch.notices[0]
    assert metrics.cached_share(first) == 0.0
    assert metrics.cached_share(second) == 32 / 40


def test_a_cache_without_a_salt_is_emptied_before_each_run(begin: Begin) -> None:
    made = measure(begin(reset="/reset", **IGNORES_SALT))
    assert (mixed(made), shares(made)) == ([False, False], [0.0, 0.0])
    unsalted = replace(SALTED, salt=None)
    made = measure(begin(unsalted, reset="/reset"))
    assert (mixed(made), shares(made)) == ([False, False], [0.0, 0.0])
    made = measure(begin(unsalted))
    assert mixed(made) == [False, True]


def test_a_cache_that_cannot_be_emptied_makes_the_run_invalid(begin: Begin) -> None:
    made = measure(begin(replace(SALTED, salt=None), reset="/reset", reset_status=503))
    assert mixed(made) == [True, True]
    assert made.results.runs[0].invalid[0] == (
        "the prefix cache was not emptied: POST /reset was answered with 503 cache flushed"
    )


def test_what_requests_of_one_run_share_is_meant(begin: Begin) -> None:
    made = measure(begin(more="prefix = { tokens = 32 }"))
    assert mixed(made) == [False, False]
    # All but the first request, or the first two together, find the 32 tokens before their 40.
    for share in shares(made):
        assert share is not None
        assert 6 / 8 * 32 / 72 - 1e-9 <= share <= 7 / 8 * 32 / 72 + 1e-9
    made_report = report_of(made)
    runs = made_report["cases"][0]["runs"]
    assert runs[0]["cached_share"] == pytest.approx(runs[0]["expected_hit_rate"], rel=0.2)
    assert runs[0]["notices"] == []


def test_much_less_than_was_meant_is_told(begin: Begin) -> None:
    """A cache whose blocks are longer than the prefix finds nothing of it."""
    made = measure(begin(more="prefix = { tokens = 32 }", block_tokens=64))
    assert (mixed(made), shares(made)) == ([False, False], [0.0, 0.0])
    made_report = report_of(made)
    (notice,) = made_report["cases"][0]["runs"][0]["notices"]
    assert notice.startswith("0% of the prompt tokens were cached, of 39% that requests share")
    (line,) = table.notices(parse(made_report))
    assert line.startswith("odd: w c1: 0% of the prompt tokens were cached")
    text = terminal(made_report, 200, color=False)
    assert line in " ".join(text.split())


def report_of(made: Night) -> dict[str, Any]:
    judged = verdict_of(made)
    return document(made.results, judged, headway_version="0")


def verdict_of(made: Night) -> Sequence[Any]:
    # Whatever this machine did to the client meanwhile is not what these tests are about.
    runs = tuple(replace(run, invalid=()) for run in made.results.runs)
    return verdict.judge(replace(made.results, runs=runs), memory.Memory())


def test_where_the_server_does_not_say_there_is_no_cell(begin: Begin) -> None:
    made = measure(begin(tells_cached=False))
    assert shares(made) == [None, None]
    assert not [one for one in verdict_of(made) if one.metric == "cached_share"]
    limit = '\n[[limit]]\nmetric = "cached_share"\nmax = 0.1\n'
    made = measure(begin(tells_cached=False, more=limit))
    found = [one for one in verdict_of(made) if one.metric == "cached_share"]
    assert {one.verdict for one in found} == {"MISSING"}
    made = measure(begin())
    found = [one for one in verdict_of(made) if one.metric == "cached_share"]
    assert [(one.verdict, one.value) for one in found] == [("PASS", 0.0), ("PASS", 0.0)]


def test_the_probe_goes_into_the_journal_and_the_report(begin: Begin) -> None:
    made = measure(begin(ids=False))
    (launch,) = night.read(made.folder)[1].launches
    assert launch.can is not None
    assert not launch.can.ids_out
    (engine,) = report_of(made)["instances"]
    assert engine["capabilities"] == codec.encode(launch.can)
    assert engine["notices"] == list(launch.notices)
    assert "no token ids come with the output" in engine["notices"][0]
    # And it is not sent: the Runs are answered as the probe was.
    assert all(record.completed for run in made.results.runs for record in run.records)


def test_an_engine_that_cannot_do_what_its_workload_needs_fails_its_launch(begin: Begin) -> None:
    made = begin(more_prompt_tokens=1)
    made.expect(made.suite.cases())
    night.measure_all(made, made.cases)
    (launch,) = made.results.launches
    assert (launch.failure_kind, launch.launch_s) == ("cannot", None)
    assert launch.failure == (
        "odd takes no token ids as a prompt, which workload w sends: "
        "it counts 41 prompt tokens where 40 ids were sent"
    )


def test_an_engine_that_dies_of_a_question_has_not_come_up(begin: Begin) -> None:
    made = begin(dies_of="logprobs")
    made.expect(made.suite.cases())
    night.measure_all(made, made.cases)
    (launch,) = made.results.launches
    assert launch.failure_kind == "died_loading"
    assert launch.failure is not None
    assert launch.failure.startswith("odd ended while it was probed")


def test_case_15_a_server_that_refuses_ignore_eos_is_measured_without_it(begin: Begin) -> None:
    made = measure(begin(refuses=["ignore_eos"]))
    assert all(record.completed for run in made.results.runs for record in run.records)
    (launch,) = made.results.launches
    assert "ignore_eos is not sent to it: it answered 400" in launch.notices[0]


# What may be cached, by a cache of single tokens that has everything: an upper bound for any other.

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=12)


@given(prompts, st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_order_finds_more_than_the_most(given_prompts: Any, block: int, random: Any) -> None:
    requests = [Request(k, tuple(ids), 1) for k, ids in enumerate(given_prompts)]
    most = prefix_cache.most_cached(requests)
    order = list(range(len(requests)))
    random.shuffle(order)
    seen: set[tuple[int, ...]] = set()
    for k in order:
        ids = requests[k].prompt_token_ids
        blocks = [ids[:end] for end in range(block, len(ids) + 1, block)]
        hits = [one for one in blocks if one in seen]
        assert len(hits) * block <= most[k]
        seen |= set(blocks)
    # And the bound is met: whoever comes after all others finds it, token by token.
    for k, one in enumerate(requests):
        others = [o.prompt_token_ids for j, o in enumerate(requests) if j != k]
        ends = range(len(one.prompt_token_ids) + 1)
        heads = {other[:end] for other in others for end in ends}
        found = [end for end in ends if one.prompt_token_ids[:end] in heads]
        assert most[k] == max(found, default=0)


def run_with_cached(cached: Sequence[int | None], asked: Sequence[Request], **changes: Any) -> Any:
    run = virtual.measure(FakePlan(), asked, virtual.closed(1, len(asked)))
    records = tuple(
        replace(record, cached_prompt_tokens=n)
        for record, n in zip(run.records, cached, strict=True)
    )
    return replace(run, records=records, **changes)


def test_a_little_more_is_rounding_and_much_more_is_another_run() -> None:
    asked = virtual.requests(4, prompt_tokens=50)  # no two begin alike
    assert prefix_cache.problems(run_with_cached([0, None, 2, 0], asked), asked) == ()
    (said,) = prefix_cache.problems(run_with_cached([0, 0, 3, 0], asked), asked)
    assert said.startswith("3 of 200 prompt tokens came from a prefix cache beyond")


def test_turns_may_find_all_that_was_said_before() -> None:
    own = [Request(k, tuple(range(100 * k, 100 * k + 10)), 5, session=0, turn=k) for k in range(3)]
    run = virtual.measure(FakePlan(), own, virtual.closed(1, 3))
    assert [record.asked_prompt_tokens for record in run.records] == [10, 25, 40]
    meant = replace(run, records=with_cached(run.records, (0, 15, 30)))
    assert prefix_cache.problems(meant, own) == ()
    more = replace(run, records=with_cached(run.records, (0, 15, 40)))
    assert len(prefix_cache.problems(more, own)) == 1


def with_cached(records: Sequence[Any], cached: Sequence[int]) -> tuple[Any, ...]:
    return tuple(replace(r, cached_prompt_tokens=n) for r, n in zip(records, cached, strict=True))


def test_what_a_template_puts_around_every_message_is_shared_by_all() -> None:
    asked = virtual.requests(4, prompt_tokens=50)
    run = run_with_cached([0, 12, 12, 12], asked, prompt_path="chat")
    assert len(prefix_cache.problems(run, asked)) == 1
    longer = tuple(replace(r, prompt_tokens=62) for r in run.records)
    assert prefix_cache.problems(replace(run, records=longer), asked) == ()


def test_a_user_s_own_request_is_salted_and_not_changed_otherwise() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "cache_salt": "mine"})
    recipient = loadgen.Recipient(Target("h", 1), "m", SALTED, salt="ours")
    for given_body, salt in ((body, "mine"), (body.replace("cache_salt", "user"), "ours")):
        raw = loadgen.payload(Request(0, (), 3, body=given_body), recipient)
        assert json.loads(raw.partition(b"\r\n\r\n")[2])["cache_salt"] == salt
