"""How prompts reach a server: as ids, as text, through its chat template; and what it counts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import (
    answers,
    correctness,
    loadgen,
    metrics,
    night,
    outlook,
    questions,
    sse,
    suite,
    verdict,
)
from headway.core import CHAT, COMPLETIONS, Request, RequestRecord, Run, TokenEvent
from headway.engines import lines, texts
from headway.engines.fake import FakeTokenizer, fake_tokens
from headway.engines.models.folder import ModelFolder
from headway.night import Night, journal
from headway.night.prompts import Fixing
from headway.report import case_view, private
from headway.results import Written
from headway.suite import SuiteError
from headway.transport import Body, Target
from headway.workload import (
    Prefix,
    Prompts,
    Vocabulary,
    following,
    in_text,
    make_requests,
    prefix_groups,
)


class Greedy:
    """Reads the longest piece that it knows at each place, as case 22 has it."""

    begins: tuple[int, ...] = ()

    def __init__(self, pieces: dict[int, str]) -> None:
        self.pieces = pieces
        self.longest = sorted(pieces, key=lambda id: -len(pieces[id]))

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            id = next(id for id in self.longest if text.startswith(self.pieces[id], at))
            ids.append(id)
            at += len(self.pieces[id])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[id] for id in ids)


CASE_22 = Greedy({1: "a", 2: "b", 3: "ab"})
# With white space, a piece that is nothing, one that decodes to what other pieces read.
WORDS = Greedy({1: "a", 2: " a", 3: " ", 4: "b ", 5: "", 6: "ab", 7: "a ab", 8: "b"})


def write(tokenizer: Any, ids: Sequence[int], seed: str = "", fixed: Sequence[int] = ()) -> Any:
    ordinary = getattr(tokenizer, "pieces", {}) or range(10, 1000)
    return texts.write(tokenizer, ids, list(ordinary), random.Random(seed), fixed)


def test_case_22_what_is_read_as_fewer_tokens_is_mended_to_as_many_as_were_asked_for():
    assert CASE_22.encode(CASE_22.decode([1, 2, 1, 2])) == [3, 3]
    ids, text = write(CASE_22, [1, 2, 1, 2])
    assert len(ids) == 4
    assert CASE_22.encode(text) == ids


def test_case_22_a_prompt_of_one_token_is_never_empty():
    assert write(CASE_22, [1]) == ([1], "a")
    for seed in range(20):
        ids, text = write(WORDS, [5], str(seed))
        assert (len(ids), text.strip()) == (1, text)
        assert text


@given(
    st.sampled_from([CASE_22, WORDS]).flatmap(
        lambda one: st.tuples(
            st.just(one), st.lists(st.sampled_from(sorted(one.pieces)), min_size=1, max_size=40)
        )
    ),
    st.text(max_size=3),
)
def test_a_text_becomes_exactly_its_ids_and_is_a_function_of_its_seed(given_ids, seed):
    tokenizer, asked = given_ids
    ids, text = write(tokenizer, asked, seed)
    assert len(ids) == len(asked)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text == text.strip() != ""
    assert write(tokenizer, asked, seed) == (ids, text)
    longer, more = write(tokenizer, asked, seed, ids)
    assert longer[: len(ids)] == ids
    assert tokenizer.encode(more) == longer
    assert len(longer) == 2 * len(asked)


@given(st.lists(st.integers(10, 999), min_size=1, max_size=30))
def test_ids_that_come_back_are_left_as_they_are(ids):
    assert write(FakeTokenizer(), ids) == (ids, FakeTokenizer().decode(ids))


def test_long_prompts_take_few_tries():
    asked = 0

    class Counting(Greedy):
        def encode(self, text: str) -> list[int]:
            nonlocal asked
            asked += 1
            return super().encode(text)

    tokenizer = Counting(CASE_22.pieces)
    ids, _ = write(tokenizer, random.Random(1).choices([1, 2, 3], k=4000))
    assert len(ids) == 4000
    assert asked < 40


class Hopeless(Greedy):
    """Reads every text as one token more than it was written with."""

    begins = (7,)

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), 1]


FOLDER = ModelFolder("toy", Path(), "1", 4, (0,), (), 64)


def test_a_tokenizer_that_gives_nothing_back_is_named_with_the_length(monkeypatch):
    monkeypatch.setattr(texts, "load", lambda folder: Hopeless(CASE_22.pieces))
    ready, carry_out = texts.open_texts(FOLDER, argparse.Namespace())
    assert ready == {"begins": [7]}

    def ask(**question: object) -> dict[str, Any]:
        return lines.answer(carry_out, json.dumps(question))

    for n in (1, 9):
        answer = ask(id=n, ids=[1] * n, fixed=[], seed="s")
        assert answer["id"] == n
        assert f"the tokenizer of toy gives no text of {n} tokens back" in answer["error"]
    assert ask(ids=[], fixed=[])["error"] == "ids must be a list of at least one token id"
    assert "ids[0] must be a token id from 0 to 3" in ask(ids=[4], fixed=[])["error"]


class Pen:
    """A writer in this process."""

    begins = (9,)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def write(self, ids: Sequence[int], fixed: Sequence[int], seed: str) -> Any:
        found, text = write(self.tokenizer, ids, seed, fixed)
        return tuple(found), text


TOY = Vocabulary(4, (0,))


def fixing(prompts: Prompts, pen: Any, drawn: Sequence[Request], **options: Any) -> Fixing:
    groups = prefix_groups(prompts.prefix, prompts.name, len(drawn), 1)
    return Fixing(prompts, lambda again: drawn, "place", groups, pen, **options)


def written(prompts: Prompts, tokenizer: Any, drawn: Sequence[Request], n: int) -> Written:
    made = fixing(prompts, Pen(tokenizer), drawn)
    ids, texts = zip(*map(made.one, range(n)), strict=True)
    return Written("toy", prompts.name, 1, ids, texts, made.begins)


def test_what_prompts_share_they_share_as_text_and_fewer_are_a_prefix_of_more():
    prompts = Prompts("w", 6, 3, prefix=Prefix(8, groups=2, share=0.7), send="text")
    drawn = make_requests(prompts, 30, 1, 1, TOY)
    found = written(prompts, CASE_22, drawn, 30)
    assert found.begins == (9,)
    assert [len(ids) for ids in found.ids] == [len(r.prompt_token_ids) for r in drawn]
    assert all(CASE_22.encode(t) == [*ids] for ids, t in zip(found.ids, found.texts, strict=True))
    heads = {ids[:8] for ids in found.ids if len(ids) == 14}
    assert len(heads) == len({r.prompt_token_ids[:8] for r in drawn if len(r.prompt_token_ids) > 6})
    fewer = written(prompts, CASE_22, drawn, 11)
    assert (fewer.ids, fewer.texts) == (found.ids[:11], found.texts[:11])


PLAIN = Request(0, (11, 12), 5)


def body_of(request: Request) -> tuple[str, dict[str, Any]]:
    recipient = loadgen.Recipient(Target("h", 1), "m")
    head, _, body = loadgen.payload(request, recipient).partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), json.loads(body)


def test_what_is_sent_on_each_path():
    common = body_of(PLAIN)[1]
    assert common.pop("prompt") == [11, 12]
    path, body = body_of(in_text(PLAIN, (11, 12), "<11><12>", "text"))
    assert (path, body) == (COMPLETIONS, {**common, "prompt": "<11><12>"})
    path, body = body_of(in_text(PLAIN, (11, 12), "<11><12>", "chat"))
    messages = [{"role": "user", "content": "<11><12>"}]
    assert (path, body) == (CHAT, {**common, "messages": messages})


def test_a_chat_goes_on_with_the_text_of_the_answer():
    first = in_text(PLAIN, (11, 12), "one", "chat")
    own = in_text(Request(1, (13,), 5, session=0, turn=1), (13,), "two", "chat")
    events = [TokenEvent(0.1, "hm", kind="reasoning"), TokenEvent(0.2, "Y"), TokenEvent(0.3, "es")]
    second = following(own, first, events)
    assert second is not None
    assert second.prompt_token_ids == ()
    assert body_of(second)[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "two"},
    ]


SUITE = """
[suite]
model = "fake"
launches = 1
idle_timeout_s = 2
calibrate = false
[engine.a]
kind = "fake"
args = {{ ttft_s = 0.02, itl_s = 0.008 }}
[workload.w]
prompt_tokens = 8
output_tokens = 5
concurrency = [2]
requests = 8
{keys}
[baseline]
metrics = []
"""


def loaded(folder: Path, keys: str, *overrides: str) -> suite.Suite:
    path = folder / "s.toml"
    path.write_text(SUITE.format(keys=keys))
    return suite.load(path, overrides)


def test_a_suite_says_the_path_and_ids_are_the_default(tmp_path):
    for keys, send in (("", "ids"), ('send = "text"', "text"), ('send = "chat"', "chat")):
        prompts = loaded(tmp_path, keys).workloads[0].prompts
        assert (prompts.send, prompts.path) == (send, send)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('send = "tokens"', "workload.w.send is 'tokens'; allowed: ids, text, chat"),
        ('send = "text"\nturns = 2', "workload.w.turns have no place in a plain text"),
        ('send = "chat"\nprompts = "recall"\nscale = 4', "workload.w.send is 'chat'; recall"),
    ],
)
def test_a_path_that_cannot_be_taken_is_refused(tmp_path, keys, said):
    with pytest.raises(SuiteError) as caught:
        loaded(tmp_path, keys)
    assert said in str(caught.value)


def record(index: int, prompt: int | None, asked: int = 8) -> RequestRecord:
    events = (TokenEvent(0.1, "x", (5,), 1),)
    made = RequestRecord(index, 0.0, 0.0, 0.1, events, 1, asked)
    return dataclasses.replace(made, prompt_tokens=prompt, completion_tokens=1)


@pytest.mark.parametrize(
    ("path", "begins", "counted", "added", "accuracy"),
    [
        ("ids", 0, [8, 8, 8], 0, 1.0),
        ("ids", 1, [9, 9, 9], 0, 0.0),
        ("text", 0, [8, 8, 8], 0, 1.0),
        ("text", 1, [9, 9, 9], 1, 1.0),  # a begin mark of the model's own tokenizer
        ("text", 1, [8, 8, 8], 0, 1.0),  # a server that puts none there
        ("text", 0, [9, 9, 9], 0, 0.0),
        ("text", 1, [10, 10, 10], 0, 0.0),
        ("text", 1, [9, 9, 8], 1, 2 / 3),
        ("text", 1, [9, 10, 11], 1, 1 / 3),
        ("chat", 0, [20, 20, 20], 12, 1.0),
        ("chat", 0, [20, 21, 20], 12, 2 / 3),
        ("chat", 0, [6, 6, 6], 0, 0.0),  # no template takes tokens away
        ("chat", 0, [None, None, None], 0, 1.0),
        ("requests_file", 0, [None], 0, 1.0),
    ],
)
def test_case_22_what_a_server_may_count_besides_is_one_number(
    factory, path, begins, counted, added, accuracy
):
    case = factory.make_suite().cases()[0]
    run = factory.make_run(case, 1, factory.level(1), factory.Speed())
    records = tuple(record(k, n) for k, n in enumerate(counted))
    run = dataclasses.replace(run, records=records, prompt_path=path, begin_tokens=begins)
    assert metrics.tokens_added(run) == added
    assert metrics.token_accuracy(run) == pytest.approx(accuracy)
    view = case_view._added(run)
    exact = [n - 8 for n in counted if n is not None]
    assert view == (None if not exact else case_view.shape.Span(min(exact), max(exact)))


Begin = Callable[..., Night]


@pytest.fixture
def begin(tmp_path: Path, night_of: Begin) -> Begin:
    """Begin a night over a small suite in a folder of its own."""

    def make(keys: str, *overrides: str, lab: type[night.RealLab] = night.RealLab) -> Night:
        return night_of(loaded(tmp_path, keys, *overrides), lab=lab)

    return make


def measured(made: Night) -> Run:
    made.expect(made.suite.cases())
    night.measure_all(made, made.suite.cases())
    made.verify_all()
    made.finish()
    assert made.results.finished
    return made.results.runs[-1]


def told(made: Night, metric: str) -> verdict.Finding:
    judged = verdict.judge(made.results, verdict.Memory(lambda case: None))
    (cell,) = [one for one in judged if one.metric == metric and one.case.level]
    return cell.findings[0]


# What FakeTokenizer's own chat template puts around a message of the user and of the assistant.
USER, ASSISTANT = len("user: \n"), len("assistant: \n")


@pytest.mark.parametrize(
    ("send", "added", "equality"),
    [("ids", 0, "PASS"), ("text", 0, "PASS"), ("chat", USER, "SKIPPED")],
)
def test_every_path_is_measured_counted_and_stated(begin: Begin, send, added, equality):
    made = begin(f'send = "{send}"\nprefix = {{ tokens = 3 }}')
    run = measured(made)
    assert not run.invalid
    assert (run.prompt_path, run.begin_tokens) == (send, 0)
    assert {r.asked_prompt_tokens for r in run.records} == {11}
    assert {r.prompt_tokens for r in run.records} == {11 + added}
    assert told(made, "token_accuracy").verdict == "PASS"
    assert told(made, "greedy_equality").verdict == equality
    hide = private.Private(None, None)
    (view,) = case_view.view(made.results, run.case, hide).runs
    assert view.prompt_path == send
    assert view.added_prompt_tokens == case_view.shape.Span(added, added)
    # All of it is read back from the journal, without an engine or a tokenizer.
    _, again = journal.read(made.folder)
    assert again == made.results
    for one, kept in zip(questions.requests_of(again, run), run.records, strict=True):
        if send == "text":
            assert kept.output_token_ids == tuple(fake_tokens(one.prompt_token_ids, 5))
        assert one.texts == (
            () if send == "ids" else (FakeTokenizer().decode(one.prompt_token_ids),)
        )


def test_a_chat_of_several_turns_says_all_that_was_said(begin: Begin):
    made = begin('send = "chat"\nturns = 2')
    run = measured(made)
    assert [r.error for r in run.records] == [None] * 8
    first, second = run.records[0::2], run.records[1::2]
    assert {(r.asked_prompt_tokens, r.prompt_tokens) for r in first} == {(8, USER + 8)}
    said = USER + 8 + ASSISTANT + 5 + USER + 8
    assert {(r.asked_prompt_tokens, r.prompt_tokens) for r in second} == {(0, said)}
    assert told(made, "token_accuracy").verdict == "PASS"


@pytest.mark.parametrize("send", ["text", "chat"])
def test_an_engine_that_reads_text_as_other_tokens_is_found(begin: Begin, send):
    run = measured(made := begin(f'send = "{send}"', "engine.a.args.other_tokenizer=true"))
    assert all(record.completed for record in run.records)
    finding = told(made, "token_accuracy")
    assert finding.verdict == "LIMIT"
    assert "prompt tokens, 8 ids were asked for" in finding.reason
    equality = told(made, "greedy_equality")
    if send == "text":
        assert (equality.verdict, answers.OTHER_IDS in equality.reason) == ("MISSING", True)


class Mute(night.RealLab):
    """A lab whose tokenizer writes nothing."""

    @contextmanager
    def writer(self, model: str) -> Iterator[Any]:
        raise night.ReferenceFailure("the tokenizer of fake gives no text of 8 tokens back")
        yield


def test_a_night_that_is_carried_on_sends_what_was_written(begin: Begin):
    made = begin('send = "text"')
    (planned,) = night.order(made.suite)
    night.LiveLaunch(made, planned)._fix_prompts()
    assert len(made.results.written) == 2  # one for the warm-up
    again = begin('send = "text"', lab=Mute)
    assert again.folder == made.folder
    assert measured(again).prompt_path == "text"


def test_the_plan_says_the_path(tmp_path):
    for send, said in (
        ("ids", "uniform prompts\n"),
        ("text", "prompts sent as text\n"),
        ("chat", "prompts sent through the server's chat template: outputs are not verified\n"),
    ):
        text = outlook.describe(loaded(tmp_path, f'send = "{send}"'), outlook.Known())
        assert said in text


def test_a_prompt_that_cannot_be_written_fails_its_launch(begin: Begin):
    made = begin('send = "text"', lab=Mute)
    made.expect(made.suite.cases())
    night.measure_all(made, made.suite.cases())
    (launch,) = made.results.launches
    assert launch.failure_kind == "no_prompt"
    assert launch.failure == "workload w: the tokenizer of fake gives no text of 8 tokens back"


def test_a_begin_mark_that_the_server_counts_is_part_of_what_the_reference_reads(
    factory: ModuleType,
):
    results = factory.make_night()
    workload = results.suite.workloads[0]
    prompts = dataclasses.replace(workload.prompts, send="text")
    changed = dataclasses.replace(
        results.suite, workloads=(dataclasses.replace(workload, prompts=prompts),)
    )
    results = dataclasses.replace(results, suite=changed)
    run = results.runs[0]
    n = run.level.num_requests
    drawn = questions.drawn_for(results, run.case, n, run.launch)[:n]
    made = written(prompts, FakeTokenizer(), drawn, n)
    made = dataclasses.replace(made, model=run.case.model, launch=run.launch)
    results = dataclasses.replace(results, written={made.key: made})
    for more, begins in ((0, ()), (1, (9,))):
        records = tuple(
            dataclasses.replace(one, prompt_tokens=one.asked_prompt_tokens + more)
            for one in run.records
        )
        read = dataclasses.replace(run, records=records, prompt_path="text", begin_tokens=1)
        assert metrics.token_accuracy(read) == 1.0
        found = questions.requests_of(results, read)
        assert [one.prompt_token_ids for one in found] == [(*begins, *ids) for ids in made.ids]
        assert list(correctness._completed(results, read)) == list(zip(found, records, strict=True))


def test_why_chats_are_not_verified_is_said(tmp_path):
    made = loaded(tmp_path, 'send = "chat"')
    said = correctness.why_unverified(SimpleNamespace(suite=made), made.cases()[0])
    assert said == "the server's own chat template is around the prompts: its tokens are not known"


def answered(*pieces: tuple[float, dict[str, Any] | None]) -> RequestRecord:
    """Return the record of a chat's answer, whose events came at known times."""
    body = Body()
    for at_s, event in pieces:
        body.data += b"data: " + (json.dumps(event).encode() if event else b"[DONE]") + b"\n\n"
        body.stamp(at_s, 0.0)
    stream = sse.parse(body)
    return RequestRecord(
        0,
        due_s=0.0,
        sent_s=0.0,
        ended_s=0.41,
        events=stream.events,
        asked_tokens=4,
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=stream.completion_tokens,
        finish_reason="length",
    )


def test_case_23_tokens_are_counted_by_the_server_never_anew_from_pieces_of_text():
    letters = [
        (at_s, {"choices": [{"index": 0, "delta": {"content": letter}, "finish_reason": None}]})
        for at_s, letter in ((0.1, "a"), (0.2, "b"), (0.3, "c"), (0.4, "d"))
    ]
    usage = {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    found = answered(*letters, (0.4, {"choices": [], "usage": usage}), (0.41, None))
    assert (found.prompt_tokens, metrics.output_tokens(found)) == (6, 4)
    assert metrics.tpot_s(found) == pytest.approx(0.1)
    assert metrics.itl_s(found) == pytest.approx([0.1, 0.1, 0.1])
    assert metrics.token_problems(found) == []
    shorter = dataclasses.replace(found, asked_tokens=3)
    assert metrics.token_problems(shorter) == ["4 tokens came, at most 3 were asked for"]
    silent = answered(*letters, (0.41, None))
    assert metrics.token_problems(silent) == ["neither ids nor usage say how many tokens came"]
