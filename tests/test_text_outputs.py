"""Outputs that come without ids: what their text can stand for, with faults planted in it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import answers, correctness, questions, verdict
from headway.core import Case, RequestRecord, TokenEvent
from headway.engines import reference
from headway.engines.fake import MODEL, FakeTokenizer
from headway.engines.models import spelling
from headway.engines.models.folder import ModelFolder
from headway.engines.models.scores import Scores
from headway.engines.models.spelling import Option, Text
from headway.night.verify import Reference

EPSILON = 0.25
END = 0


class Bytes:
    """A byte-level tokenizer: pieces of bytes, of which some are parts of a character.

    Id 0 ends an answer and is not written. A text is read by the longest piece at each place.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"", *pieces]
        longest = sorted(range(1, len(self.pieces)), key=lambda id: -len(self.pieces[id]))
        self.longest = longest

    def encode(self, text: str) -> list[int]:
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            fitting = (id for id in self.longest if data.startswith(self.pieces[id], at))
            id = next(fitting, None)
            if id is None:
                return []
            ids.append(id)
            at += len(self.pieces[id])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[id] for id in ids).decode("utf-8", "replace")


# Letters, a pair of them, whole characters, characters in halves, and one with a letter before it.
MIXED = Bytes(
    [b"a", b"b", b"ab", "é".encode(), *(bytes([b]) for b in "é€".encode()), b"a\xe2\x82", b" "]
)
WORDS = Bytes([f"<{k}>".encode() for k in range(1, 12)])
TOKENIZERS = st.sampled_from([MIXED, WORDS])


class Toy:
    """A model whose logits are drawn for each context, after `seed`."""

    def __init__(self, tokenizer: Bytes, seed: int) -> None:
        self.size, self.seed = len(tokenizer.pieces), seed

    def logits(self, context: Sequence[int]) -> list[float]:
        draw = random.Random(f"{self.seed}/{list(context)}")
        return [draw.gauss(0, 1) for _ in range(self.size)]

    def options(
        self, prompt: Sequence[int], epsilon: float, banned: Sequence[int] = ()
    ) -> spelling.Options:
        context = list(prompt)
        while True:
            logits = self.logits(context)
            allowed = [id for id in range(self.size) if id not in banned]
            order = sorted(allowed, key=lambda id: -logits[id])
            best = logits[order[0]]
            near = [Option(id, best - logits[id], rank) for rank, id in enumerate(order)]
            context.append((yield [one for one in near if one.gap <= epsilon]))

    def score(
        self, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()
    ) -> Scores:
        gaps, best = [], []
        for k, id in enumerate(output):
            logits = self.logits([*prompt, *output[:k]])
            logits = [-math.inf if i in banned else one for i, one in enumerate(logits)]
            gaps.append(max(logits) - logits[id])
            best.append(logits.index(max(logits)))
        ranks = [int(gap > 0) for gap in gaps]
        return Scores(gaps, ranks, [1.0] * len(gaps), best, [0.0] * len(gaps))

    def greedy(
        self, prompt: Sequence[int], n: int, noise: float = 0.0, banned: Sequence[int] = ()
    ) -> list[int]:
        """Return n tokens, END among them like any other, of logits that are off by some noise."""
        ids: list[int] = []
        draw = random.Random(f"noise/{self.seed}")
        for _ in range(n):
            exact = self.logits([*prompt, *ids])
            logits = [one + draw.uniform(-noise, noise) for one in exact]
            logits = [-math.inf if i in banned else one for i, one in enumerate(logits)]
            ids.append(logits.index(max(logits)))
        return ids


def streamed(tokenizer: Bytes, ids: Sequence[int]) -> list[str]:
    """Return the texts of a stream's events: a character is sent when it is whole."""
    sent, events = "", []
    for k in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:k])
        if text != sent and not text.endswith(spelling.INCOMPLETE):
            events.append(text[len(sent) :])
            sent = text
    return events


def judged(
    tokenizer: Bytes,
    toy: Toy,
    text: str,
    n: int,
    ends: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> dict:
    return spelling.judge(toy, tokenizer, [1, 2], Text(text, n, ends, banned), EPSILON)


def right(found: dict) -> bool:
    """Whether float32 lets an output stand."""
    return found["differs_at"] is None and found["max_gap"] == 0


GIVEN = (TOKENIZERS, st.integers(0, 10**6), st.integers(1, 12))


@given(*GIVEN)
def test_a_right_text_passes_however_its_characters_were_split_over_events(tokenizer, seed, n):
    toy = Toy(tokenizer, seed)
    ids = toy.greedy([1, 2], n)
    text = "".join(streamed(tokenizer, ids))
    assert text in spelling.shown(tokenizer, ids)
    for sent in (text, tokenizer.decode(ids)):
        found = judged(tokenizer, toy, sent, n)
        assert right(found)
        assert found["num_tokens"] == n


@given(*GIVEN, st.randoms(use_true_random=False))
def test_a_changed_text_is_wrong_exactly_where_the_reference_could_not_have_shown_it(
    tokenizer, seed, n, draw
):
    toy = Toy(tokenizer, seed)
    ids = toy.greedy([1, 2], n)
    text = "".join(streamed(tokenizer, ids))
    at = draw.randrange(len(text) + 1)
    faults = {
        "another character": text[:at] + draw.choice("abé€x") + text[at + 1 :],
        "a character lost": text[:at] + text[at + 1 :],
        "a character more": text[:at] + draw.choice("abé") + text[at:],
        "the last token lost": "".join(streamed(tokenizer, ids[:-1])),
        "a token twice": "".join(streamed(tokenizer, [*ids[:1], *ids])),
        "another's answer": "".join(streamed(tokenizer, toy.greedy([2, 1], n))),
    }
    for fault, spoilt in faults.items():
        found = judged(tokenizer, toy, spoilt, n)
        assert right(found) == (spoilt in spelling.shown(tokenizer, ids)), fault
        if found["differs_at"] is not None and found["by"] == "text":
            assert 0 <= found["differs_at"] <= len(spoilt)


def test_a_difference_is_told_by_its_first_character():
    toy = next(t for t in (Toy(WORDS, k) for k in range(99)) if END not in t.greedy([1, 2], 9))
    text = WORDS.decode(toy.greedy([1, 2], 9))
    at = text.index("<", 1) + 1
    found = judged(WORDS, toy, f"{text[:at]}x{text[at + 1 :]}", 9)
    assert (found["by"], found["differs_at"]) == ("text", at)


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_ties_within_the_tolerance_are_found_where_tokens_cannot_be_mistaken(seed, n):
    """Logits are off by up to 0.1 each way, so that a token's gap is 0.2 at most."""
    toy = Toy(WORDS, seed)
    ids = toy.greedy([1, 2], n, noise=0.1)
    found = judged(WORDS, toy, WORDS.decode(ids), n)
    # A token that is not written may stand anywhere, so that another one may be found.
    if END not in ids:
        assert found["differs_at"] is None
        assert found["max_gap"] <= 0.2 + 1e-9
        assert found["num_nonargmax"] == sum(gap > 0 for gap in toy.score([1, 2], ids).gaps)


@given(*GIVEN)
def test_an_answer_ends_with_its_end(tokenizer, seed, n):
    toy = Toy(tokenizer, seed)
    ids = toy.greedy([1, 2], n)
    whole = "".join(streamed(tokenizer, ids))
    early = END in ids[:-1]
    assert right(judged(tokenizer, toy, whole, n, ends=(END,))) != early
    if END in ids:
        k = ids.index(END) + 1
        ended = "".join(streamed(tokenizer, ids[:k]))
        found = judged(tokenizer, toy, ended, k, ends=(END,))
        assert right(found)
        if tokenizer is WORDS:
            assert found["by"] == "ids"  # an end is read where a token is missing


# Through the process's own protocol, with the model whose tokens are known in closed form


FOLDER = ModelFolder.from_json(MODEL)


class InThisProcess:
    """Stands where the reference's process stands."""

    def ask(self, **question: object) -> dict[str, object]:
        return reference._carry_out(reference.FakeReference(), FOLDER, question)


def judge_fake(
    text: str, n: int, prompt: tuple[int, ...] = (11, 12), banned: tuple[int, ...] = ()
) -> correctness.Verification:
    pair = answers._in_text(prompt, text, n, True, banned)
    assert isinstance(pair, answers.TextPair)
    return Reference(InThisProcess()).verify(pair)


def test_a_text_is_asked_about_and_its_verdict_comes_back():
    ids = reference.FakeReference().generate((11, 12), 6, True)
    text = FakeTokenizer().decode(ids)
    fine = judge_fake(text, 6)
    assert (fine.by, fine.differs_at, fine.max_gap, fine.num_tokens) == ("ids", None, 0.0, 6)
    assert judge_fake(text, 5).differs_at is not None
    lost = judge_fake(FakeTokenizer().decode(ids[:5]), 6)
    assert (lost.by, lost.differs_at) == ("text", len(FakeTokenizer().decode(ids[:5])))
    assert judge_fake(text, 6, (12, 11)).differs_at is not None
    # Where the first token is banned, another text is right, and this one no longer is.
    banned = (ids[0],)
    others = reference.FakeReference().generate((11, 12), 6, True, banned)
    found = judge_fake(FakeTokenizer().decode(others), 6, banned=banned)
    assert (found.differs_at, found.max_gap) == (None, 0.0)
    wrong = judge_fake(text, 6, banned=banned)
    assert wrong.differs_at is not None or wrong.max_gap


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"text": 5}, "text must be a text, not 5"),
        ({"text": "a\ud800"}, "half a surrogate pair"),
        ({"max_tokens": 0}, "max_tokens must be an integer of 1 or more"),
        ({"op": "guess"}, "op must be verify or verify_text or ends or generate"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(question, said):
    fine = {"op": "verify_text", "prompt": [11], "text": "<20>", "max_tokens": 1, "epsilon": 0.1}
    with pytest.raises(reference.RefusedRequestError, match=said):
        InThisProcess().ask(**{**fine, **question})


# Judged as a case


CASE = Case("a", "fake", "w32_16", "c4")


def as_text(record: RequestRecord) -> RequestRecord:
    """Return what a server would have sent that sends no ids."""
    events = tuple(
        TokenEvent(one.at_s, FakeTokenizer().decode(one.token_ids or ()), engine_at_s=None)
        for one in record.events
    )
    counted = len(record.output_token_ids or ())
    return dataclasses.replace(record, events=events, completion_tokens=counted)


def spoil(record: RequestRecord, text: str) -> RequestRecord:
    """Return a record whose first event has another text."""
    first = dataclasses.replace(record.events[0], text=text)
    return dataclasses.replace(record, events=(first, *record.events[1:]))


@pytest.fixture
def night(factory):
    """Return a night whose engine's answers are right, and came as text."""

    def make(dtype: str = "float32", fault=lambda records: records):
        suite = factory.make_suite(("a",), dtype=dtype)
        made = factory.make_night({"a": factory.Speed()}, suite=suite)
        runs = []
        for run in made.runs:
            asked = questions.requests_of(made, run)
            records = tuple(
                as_text(answered(request, record))
                for request, record in zip(asked, run.records, strict=True)
            )
            runs.append(dataclasses.replace(run, records=tuple(fault(list(records)))))
        made = dataclasses.replace(made, runs=tuple(runs))
        todo = correctness.pairs(made, "fake")
        found = {pair.key: Reference(InThisProcess()).verify(pair) for pair in todo}
        return dataclasses.replace(made, verifications=found)

    return make


def answered(request, record: RequestRecord) -> RequestRecord:
    """Return the record of a right answer to a request."""
    n = len(record.output_token_ids or ())
    ids = reference.FakeReference().generate(request.prompt_token_ids, n, True)
    events = tuple(
        dataclasses.replace(event, token_ids=(id,), num_tokens=1)
        for event, id in zip(record.events, ids, strict=True)
    )
    return dataclasses.replace(record, events=events)


def test_right_texts_are_counted_by_how_they_were_judged(night):
    made = night()
    found = correctness.equality(made, CASE)
    assert found.num_requests == found.right > 0
    assert (found.wrong, found.unverified, found.by_text) == ((), (), 0)  # read as the very ids
    by_text = {key: dataclasses.replace(one, by="text") for key, one in made.verifications.items()}
    made = dataclasses.replace(made, verifications=by_text)
    assert correctness.equality(made, CASE).by_text == found.right
    judged = verdict.judge_equality(made, CASE)
    assert judged.verdict == "PASS"
    assert judged.findings[0].reason.endswith(f", {found.right} outputs by their text")


def exchanged(records):
    one, other = records[0], records[1]
    records[0] = dataclasses.replace(one, events=other.events)
    records[1] = dataclasses.replace(other, events=one.events)
    return records


def another_character(records):
    records[0] = spoil(records[0], "<9>")
    return records


def last_token_lost(records):
    records[0] = dataclasses.replace(records[0], events=records[0].events[:-1])
    return records


@pytest.mark.parametrize("fault", [exchanged, another_character, last_token_lost])
def test_planted_faults_are_wrong_in_fp32_and_not_verified_where_ties_are_allowed(night, fault):
    made = night(fault=fault)
    assert verdict.judge_equality(made, CASE).verdict == "WRONG"
    reason = verdict.judge_equality(made, CASE).findings[0].reason
    assert "request 0: its text is not what the reference would write from character " in reason
    made = night("bfloat16", fault)
    found = correctness.equality(made, CASE)
    assert not found.wrong
    assert "no tokens were found that spell its text: a tie may be why" in found.unverified[0]
    assert verdict.judge_equality(made, CASE).verdict == "MISSING"


def test_a_text_without_a_count_is_not_verified(night):
    made = night(fault=lambda all: [dataclasses.replace(r, completion_tokens=None) for r in all])
    found = correctness.equality(made, CASE)
    assert found.right == 0
    assert found.unverified[0].endswith(answers.UNCOUNTED)


def test_a_text_is_verified_once_and_by_what_was_asked():
    keys = {
        answers.text_key((1, 2), "a", 3, True),
        answers.text_key((1,), "a", 3, True),
        answers.text_key((1, 2), "b", 3, True),
        answers.text_key((1, 2), "a", 4, True),
        answers.text_key((1, 2), "a", 3, False),
    }
    assert len(keys) == 5
