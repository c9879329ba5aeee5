"""Requests that follow each other's answers, and requests that are a user's own."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import correctness, loadgen, suite
from headway.core import Capabilities, Request
from headway.engines.fake import FakePlan, fake_tokens
from headway.prefix_cache import expected_hit_rate
from headway.suite.bodies import read_bodies, requests_in
from headway.tables import SuiteError
from headway.transport import Target
from headway.workload import (
    Prompts,
    Vocabulary,
    continued,
    extremes,
    make_requests,
    workload_hash,
)

virtual = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("virtual_run.py"))))
IDS = Vocabulary(5000)
TALK = Prompts("talk", 4, 3, turns=3)


def asked(n: int, prompts: Prompts = TALK) -> list[Request]:
    return list(make_requests(prompts, n, 1, 1, IDS))


def told(requests: list[Request]) -> list[tuple[int, ...]]:
    """The prompts as they are to be sent, by the fake engine's closed form."""
    prompts: list[tuple[int, ...]] = []
    for one in requests:
        own = one.prompt_token_ids
        if one.turn:
            said = prompts[-1]
            own = (*said, *fake_tokens(said, one.max_tokens), *own)
        prompts.append(own)
    return prompts


def test_turns_come_in_order_and_begin_with_their_own_ids():
    made = asked(7)
    assert [(one.session, one.turn) for one in made] == [
        *((0, turn) for turn in range(3)),
        *((1, turn) for turn in range(3)),
        (2, 0),
    ]
    assert {len(one.prompt_token_ids) for one in made} == {4}
    assert extremes(TALK, 1) == [(4 + 2 * (4 + 3), 3)]
    assert extremes(TALK, 0) == [(4, 3)]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 0.25]))
def test_each_turn_is_sent_with_all_that_was_said(turns, n, slots, think_s):
    made = asked(n, replace(TALK, turns=turns))
    driven, transport = virtual.drive(FakePlan(), made, virtual.closed(slots, n), think_s=think_s)
    records = loadgen.records(driven, made)
    assert [one.error for one in records] == [None] * n
    by_prompt = sorted(tuple(body["prompt"]) for body in transport.bodies)
    assert by_prompt == sorted(told(made))
    for one, record in zip(made, records, strict=True):
        assert record.asked_prompt_tokens == record.prompt_tokens
        if one.turn:
            assert record.due_s == pytest.approx(records[one.index - 1].ended_s + think_s)
            assert record.sent_s >= record.due_s


def test_in_open_loop_a_conversation_begins_when_its_first_request_is_due():
    made = asked(6)
    offsets_s = [0.0, 9.0, 9.0, 0.5, 9.0, 9.0]
    driven, _ = virtual.drive(FakePlan(), made, virtual.opened(6), offsets_s)
    records = loadgen.records(driven, made)
    assert [records[0].due_s, records[3].due_s] == [0.0, 0.5]
    assert max(one.ended_s for one in records) < 5.0


def test_what_follows_an_answer_that_failed_is_not_sent_and_the_engine_is_why():
    made = asked(6)
    driven, transport = virtual.drive(FakePlan(fail_every=2), made, virtual.closed(1, 6))
    records = loadgen.records(driven, made)
    assert [one.error and one.error.kind for one in records] == [
        *(None, "server_error", "not_sent"),
        *(None, "server_error", "not_sent"),
    ]
    assert records[2].error.message == "the turn before it failed"
    assert records[2].error.origin == "engine"
    assert len(transport.bodies) == 4


def test_an_answer_without_ids_cannot_be_gone_on_from_and_that_is_no_fault_of_the_engine():
    made = asked(3)

    def without_ids(inner):
        class Without:
            async def open(self, count):
                await inner.open(count)

            async def send(self, payload, exchange):
                await inner.send(payload, exchange)
                exchange.body.data = exchange.body.data.replace(b'"token_ids"', b'"hidden___"')

            async def close(self):
                await inner.close()

        return Without()

    driven, _ = virtual.drive(FakePlan(), made, virtual.closed(1, 3), wrap=without_ids)
    records = loadgen.records(driven, made)
    assert records[0].error is None
    assert "without token ids" in records[1].error.message
    assert records[1].error.origin == "client"


def test_a_turn_finds_what_was_said_before_it_in_a_cache():
    # Of 4, 11 and 18 prompt tokens, a cache of prompts finds none, 4 and 11.
    assert expected_hit_rate(asked(3)) == pytest.approx((4 + 11) / (4 + 11 + 18))
    assert expected_hit_rate(asked(3, replace(TALK, turns=1))) == 0.0


def test_what_later_versions_added_renames_no_workload():
    plain = asked(5, Prompts("w", 4, 3))
    assert workload_hash(plain) == "3ad315030c280992"
    assert workload_hash(asked(5)) != workload_hash(asked(5, replace(TALK, turns=2)))


def test_a_continued_request_holds_question_answer_and_question():
    first, second = asked(2)
    whole = continued(second, first, (7, 8))
    assert whole.prompt_token_ids == (*first.prompt_token_ids, 7, 8, *second.prompt_token_ids)
    assert (whole.index, whole.turn) == (1, 1)


LINES = [
    {"messages": [{"role": "user", "content": "Où ?"}], "max_completion_tokens": 9, "tools": []},
    {"prompt": "Once", "max_tokens": 5, "temperature": 0.3, "model": "adapter"},
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2]}},
]


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join([*texts, ""]))
    return path


def test_a_users_own_requests_are_sent_as_they_are(tmp_path):
    bodies = read_bodies(file_of(tmp_path, LINES[0], "", *LINES[1:]))
    assert bodies.count == 3
    held = requests_in(bodies)
    assert [one.max_tokens for one in held] == [9, 5, None]
    recipient = loadgen.Recipient(Target("h", 1), "base")
    heads, sent = [], []
    for one in held:
        head, _, body = loadgen.payload(one, recipient).partition(b"\r\n\r\n")
        heads.append(head.split(b" ")[1].decode())
        sent.append(json.loads(body))
    assert heads == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert sent[0] == {**LINES[0], "model": "base", **streamed}
    assert sent[1] == {**LINES[1], **streamed}  # an adapter keeps its name
    assert sent[2] == {"prompt": [1, 2], "model": "base", **streamed}


def test_fields_that_an_endpoint_does_not_know_are_not_added_to_a_users_request(tmp_path):
    (one,) = requests_in(read_bodies(file_of(tmp_path, LINES[1])))
    recipient = loadgen.Recipient(Target("h", 1), "base", Capabilities(usage_in_stream=False))
    assert b"stream_options" not in loadgen.payload(one, recipient)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is list; it must be an object"),
        ({"body": 1}, "line 1: body is int"),
        ({"model": "m"}, "line 1 must have messages (chat) or prompt (completions)"),
        ({"messages": [], "prompt": ""}, "one of them"),
        ({"prompt": "", "n": 2}, "line 1: n is 2; one answer"),
        ({"prompt": "", "max_tokens": 0}, "line 1: max_tokens is 0"),
        ({"prompt": "", "max_tokens": True}, "line 1: max_tokens is True"),
        (
            {"url": "/v1/embeddings", "body": {"prompt": ""}},
            "line 1: url is '/v1/embeddings'; what its body holds goes to /v1/completions",
        ),
        ("", "holds no request"),
    ],
)
def test_a_file_that_is_no_list_of_requests_is_refused(line, said, tmp_path):
    with pytest.raises(SuiteError, match=r"requests\.jsonl") as caught:
        read_bodies(file_of(tmp_path, line))
    assert said in str(caught.value)


def test_a_file_that_changed_since_it_was_checked_is_refused(tmp_path):
    bodies = read_bodies(file_of(tmp_path, LINES[1]))
    file_of(tmp_path, LINES[2])
    with pytest.raises(SuiteError, match="has changed since this night began"):
        requests_in(bodies)


SUITE = """
[baseline]
metrics = []
[engine.a]
kind = "fake"
[workload.w]
{keys}
"""


def loaded(folder: Path, keys: str) -> suite.Suite:
    path = folder / "s.toml"
    path.write_text(SUITE.format(keys=keys))
    return suite.load(path)


def test_a_suite_sends_each_line_of_a_file_once(tmp_path):
    file_of(tmp_path, *LINES, LINES[0])
    made = loaded(tmp_path, 'requests_file = "requests.jsonl"\nconcurrency = [1]')
    (workload,) = made.workloads
    assert workload.levels[0].num_requests == 4
    assert workload.prompts.bodies.count == 4
    # A report holds none of a user's text: the suite names the file.
    assert "Once" not in repr(made)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('requests_file = "no.jsonl"\nconcurrency = [1]', "no.jsonl cannot be read"),
        (
            'requests_file = "requests.jsonl"\nturns = 2\nconcurrency = [1]',
            "workload.w.turns is for the lines of requests_file to say",
        ),
        (
            'requests_file = "requests.jsonl"\nrequests = 9\nconcurrency = [1]',
            "workload.w.requests is 9; ",
        ),
        ("think_s = 1\nconcurrency = [1]", "workload.w.think_s needs turns"),
        (
            'prompts = "recall"\nturns = 2\nconcurrency = [1]',
            "workload.w.turns cannot stand before recall prompts",
        ),
    ],
)
def test_what_cannot_be_is_refused(keys, said, tmp_path):
    file_of(tmp_path, *LINES, LINES[0])
    with pytest.raises(SuiteError) as caught:
        loaded(tmp_path, keys)
    assert said in str(caught.value)


def test_a_conversation_of_a_suite(tmp_path):
    made = loaded(tmp_path, "turns = 3\nthink_s = 0.5\nprompt_tokens = 8\nconcurrency = [2]")
    prompts = made.workloads[0].prompts
    assert (prompts.turns, prompts.think_s) == (3, 0.5)


def test_why_users_requests_are_not_verified_is_said(tmp_path):
    file_of(tmp_path, *LINES, LINES[0])
    made = loaded(tmp_path, 'requests_file = "requests.jsonl"\nconcurrency = [1]')
    results = SimpleNamespace(suite=made)
    said = correctness.why_unverified(results, made.cases()[0])
    assert said.startswith("prompts are a user's own requests")
