"""Prompts that are fixed before a launch: as text, and such as no answer ends early."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import answers, correctness, night, questions, suite, verdict
from headway.core import Capabilities, Request, Verification
from headway.engines import reference, servers
from headway.engines.fake import MODEL, FakeTokenizer, fake_tokens
from headway.engines.launcher import Launcher
from headway.engines.models.folder import ModelFolder
from headway.engines.servers.hosted import HOST
from headway.night import Night, journal, prompts
from headway.night.prompts import MOST_DRAWS, Fixing
from headway.night.verify import Reference
from headway.results import Generated, launch_key
from headway.suite import SuiteError
from headway.workload import Prompts, Vocabulary, make_requests, pair_key, prefix_groups

TOY = Vocabulary(64, (0, 1))


class Ending:
    """A reference whose answers to some prompts end early: to so many of a hundred."""

    def __init__(self, of_a_hundred: int) -> None:
        self.of_a_hundred = of_a_hundred
        self.asked: list[tuple[int, ...]] = []

    def ends(self, prompt: tuple[int, ...], max_tokens: int) -> bool:
        self.asked.append(prompt)
        digest = hashlib.sha256(repr((prompt, max_tokens)).encode()).digest()
        return digest[0] * 100 < self.of_a_hundred * 256

    def generate(self, request: Request, banned: tuple[int, ...]) -> Generated:
        prompt, most = request.prompt_token_ids, request.max_tokens or 1
        return Generated(pair_key(prompt, (), banned), tuple(fake_tokens(prompt, most)))

    def verify(self, pair: answers.Pair | answers.TextPair) -> Verification:
        return Reference(InThisProcess()).verify(pair)


class InThisProcess:
    """Stands where the reference's process stands."""

    def ask(self, **question: object) -> dict[str, object]:
        folder = ModelFolder.from_json(MODEL)
        return reference._carry_out(reference.FakeReference(), folder, question)


class Pen:
    """Writes ids as `<17>`; puts a mark before each text."""

    begins = (7,)

    def write(self, ids: Sequence[int], fixed: Sequence[int], seed: str) -> Any:
        whole = (*fixed, *ids)
        return whole, FakeTokenizer().decode(whole)


def fixing(asked: Prompts, judge: Ending | None, n: int, pen: Pen | None = None) -> Fixing:
    def draw(again: int) -> Any:
        return make_requests(asked, n, 1, 5, TOY, again)

    groups = prefix_groups(asked.prefix, asked.name, n, 5)
    return Fixing(asked, draw, "place", groups, pen, judge, "b")


@given(st.integers(0, 60), st.integers(1, 20))
def test_no_prompt_is_kept_that_ends_early_and_the_others_are_left_alone(of_a_hundred, n):
    asked, judge = Prompts("w", 6, 3), Ending(of_a_hundred)
    made = fixing(asked, judge, n)
    found = [made.one(k)[0] for k in range(n)]
    drawn = make_requests(asked, n, 1, 5, TOY)
    quiet = Ending(of_a_hundred)
    for ids, request in zip(found, drawn, strict=True):
        assert not quiet.ends(ids, 3)
        assert len(ids) == 6
        if not quiet.ends(request.prompt_token_ids, 3):
            assert ids == request.prompt_token_ids
    assert len(judge.asked) == n + made.early
    again = fixing(asked, Ending(of_a_hundred), n)
    assert [again.one(k)[0] for k in range(n // 2)] == found[: n // 2]


def test_a_workload_whose_answers_all_end_is_refused_with_numbers():
    made = fixing(Prompts("w", 6, 3), Ending(100), 4)
    with pytest.raises(night.ReferenceFailure) as caught:
        made.one(0)
    assert f"{MOST_DRAWS} of {MOST_DRAWS} prompts are answered with an end" in str(caught.value)
    assert "b cannot go on past it" in str(caught.value)
    assert "write ignore_eos = false" in str(caught.value)


def test_a_text_is_asked_about_with_the_mark_before_it():
    judge = Ending(40)
    made = fixing(Prompts("w", 6, 3, send="text"), judge, 8, Pen())
    found = [made.one(k) for k in range(8)]
    assert made.early
    assert all(asked[0] == 7 for asked in judge.asked)
    kept = [(7, *ids) for ids, _ in found]
    assert set(kept) <= set(judge.asked)
    assert [text for _, text in found] == [FakeTokenizer().decode(ids) for ids, _ in found]


def test_a_turn_is_judged_after_all_that_was_said_before_it():
    judge = Ending(40)
    made = fixing(Prompts("w", 6, 3, turns=3), judge, 6)
    found = [made.one(k)[0] for k in range(6)]
    assert made.early
    quiet = Ending(40)
    for first in (0, 3):
        said: tuple[int, ...] = ()
        for ids in found[first : first + 3]:
            said += ids
            assert said in judge.asked
            assert not quiet.ends(said, 3)
            said += tuple(fake_tokens(said, 3))


def test_drawn_again_lengths_and_prefixes_stay():
    asked = Prompts("w", 6, 3, prefix=None)
    one, two = (make_requests(asked, 9, 1, 5, TOY, again) for again in (0, 1))
    assert all(
        a.prompt_token_ids != b.prompt_token_ids
        and dataclasses.replace(a, prompt_token_ids=())
        == dataclasses.replace(b, prompt_token_ids=())
        for a, b in zip(one, two, strict=True)
    )
    assert one == make_requests(asked, 9, 1, 5, TOY)


def test_a_recall_prompt_that_a_tokenizer_reads_otherwise_is_refused():
    class Mending(Pen):
        def write(self, ids: Sequence[int], fixed: Sequence[int], seed: str) -> Any:
            return super().write([9, *ids[1:]], fixed, seed)

    asked = Prompts("w", 16, 4, kind="recall", send="text")
    assert fixing(asked, None, 2, Pen()).one(0)[1].startswith("<2>")
    with pytest.raises(night.ReferenceFailure, match="reads their text as other ids"):
        fixing(asked, None, 2, Mending()).one(0)


# In a night


def launcher(can: Capabilities) -> Launcher:
    """Return the fake engine under another name, which understands what `can` says."""

    def command(spec: Any, port: int) -> list[str]:
        return HOST.command(dataclasses.replace(spec, kind="fake"), port)  # type: ignore[misc]

    def info(endpoint: Any) -> Any:
        return dataclasses.replace(HOST.info(endpoint), dtype="float32", device="cpu")

    return Launcher(command, info, can)


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds whose server ends answers where the model does; takes text only; does not sample."""
    for name, can in {
        "ending": Capabilities(ignore_eos="none", fields={"return_token_ids": True}),
        "texts": Capabilities(ids_in=False, ids_out=False),
        "greedy": Capabilities(sampling=False),
    }.items():
        monkeypatch.setitem(servers.LAUNCHERS, name, launcher(can))  # type: ignore[misc]


SUITE = """
[suite]
model = "fake"
launches = 1
idle_timeout_s = 2
calibrate = false
[engine.a]
kind = "fake"
args = {{ ttft_s = 0.02, itl_s = 0.003 }}
[engine.b]
kind = "{kind}"
args = {{ ttft_s = 0.02, itl_s = 0.003 }}
[workload.w]
prompt_tokens = 8
output_tokens = 5
concurrency = [2]
requests = 8
{keys}
[baseline]
metrics = []
"""


def loaded(folder: Path, kind: str, keys: str = "") -> suite.Suite:
    path = folder / "s.toml"
    path.write_text(SUITE.format(kind=kind, keys=keys))
    return suite.load(path)


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("texts", "", "workload.w.send is 'ids', which b (texts) does not take; write send = "),
        ("greedy", "temperature = 0.7", "workload.w.temperature is 0.7, and b (greedy) does not"),
    ],
)
def test_what_a_kind_does_not_understand_is_refused_when_the_suite_is_read(
    tmp_path, kind, keys, said
):
    with pytest.raises(SuiteError) as caught:
        loaded(tmp_path, kind, keys)
    assert said in str(caught.value)
    assert loaded(tmp_path, kind, 'send = "text"').workloads


def test_when_prompts_must_be_answered_at_length(tmp_path):
    def who(kind: str, keys: str = "") -> str | None:
        made = loaded(tmp_path, kind, keys)
        return prompts.ending(made, "fake", made.workloads[0].prompts)

    assert who("ending") == "b"
    assert who("ending", 'send = "text"') == "b"
    assert who("fake") is None
    assert who("ending", "ignore_eos = false") is None
    assert who("ending", 'send = "chat"') is None


Begin = Callable[..., Night]


@pytest.fixture
def begin(tmp_path: Path, night_of: Begin) -> Begin:
    """Begin a night of two engines, whose reference ends some answers."""

    def make(kind: str, keys: str = "", of_a_hundred: int = 40) -> Night:
        class Lab(night.RealLab):
            @contextmanager
            def reference(self, model: str) -> Iterator[Any]:
                yield Ending(of_a_hundred)

        return night_of(loaded(tmp_path, kind, keys), lab=Lab)

    return make


def measured(made: Night) -> Night:
    made.expect(made.suite.cases())
    night.measure_all(made, made.suite.cases())
    made.verify_all()
    made.finish()
    assert made.results.finished
    assert journal.read(made.folder)[1] == made.results
    return made


def test_all_engines_get_the_prompts_that_one_of_them_needs(begin: Begin):
    made = measured(begin("ending"))
    runs = {run.case.instance: run for run in made.results.runs}
    assert runs["a"].workload_hash == runs["b"].workload_hash
    asked = [one.prompt_token_ids for one in questions.requests_of(made.results, runs["b"])]
    assert not any(Ending(40).ends(ids, 5) for ids in asked)
    drawn = questions.drawn_for(made.results, runs["b"].case, 8, 1)
    assert any(Ending(40).ends(one.prompt_token_ids, 5) for one in drawn)
    for run in runs.values():
        assert verdict.judge_equality(made.results, run.case).verdict == "PASS"
    assert set(made.results.written) == {("fake", "w", 1)}


def test_a_launch_fails_where_all_answers_end(begin: Begin):
    made = begin("ending", of_a_hundred=100)
    made.expect(made.suite.cases())
    night.measure_all(made, made.suite.cases())
    assert {one.failure_kind for one in made.results.launches} == {"no_prompt"}
    assert "workload w: 20 of 20 prompts" in (made.results.launches[0].failure or "")


def test_an_engine_of_texts_alone_is_started_measured_and_verified(begin: Begin):
    made = measured(begin("texts", 'send = "text"'))
    launches = {one.instance: one for one in made.results.launches}
    assert (launches["a"].first_text, launches["b"].first_output) == (None, ())
    written = made.results.written[launch_key("fake")]
    expected = FakeTokenizer().decode(fake_tokens(written.ids[0], 1))
    assert launches["b"].first_text == expected
    for name in ("a", "b"):
        assert not correctness.wrong_first_tokens(made.results, name)
        assert not correctness.unverified_first_tokens(made.results, name)
    for run in made.results.runs:
        assert all((r.output_token_ids is None) == (run.case.instance == "b") for r in run.records)
        assert verdict.judge_equality(made.results, run.case).verdict == "PASS"


def test_a_wrong_first_text_is_found(begin: Begin):
    made = measured(begin("texts", 'send = "text"'))
    (b,) = [one for one in made.results.launches if one.instance == "b"]
    for changes, found in (
        ({"first_text": "<9>"}, correctness.wrong_first_tokens),
        ({"first_prompt_tokens": 99}, correctness.unverified_first_tokens),
    ):
        spoilt = dataclasses.replace(made.results, launches=(dataclasses.replace(b, **changes),))
        todo = correctness.pairs(spoilt, "fake")
        known = {pair.key: Ending(0).verify(pair) for pair in todo}
        spoilt = dataclasses.replace(spoilt, verifications={**spoilt.verifications, **known})
        assert len(found(spoilt, "b")) == 1
