"""Texts judged by transformers: by the ids they are read as, and by tokens that spell them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines import reference, texts
from headway.engines.models import ModelFolder, prepare, scoring
from headway.engines.models.tiny_recall.task import EOS, SYMBOLS, THEN, recall_prompt

EPSILON = 0.25


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return prepare("tiny_recall", tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def judge(tiny: ModelFolder) -> reference.Reference:
    return reference.open_reference(tiny, "cpu")


def ask(judge: reference.Reference, folder: ModelFolder, **request: object) -> dict[str, object]:
    return reference.answer(judge, folder, json.dumps(request))


def told(judge, folder, prompt, text, n, **more) -> dict[str, object]:
    asked = {"op": "verify_text", "prompt": prompt, "text": text, "max_tokens": n}
    return ask(judge, folder, **asked, ignore_eos=True, epsilon=EPSILON, **more)


def write(folder: ModelFolder, ids: list[int]) -> str:
    return texts.load(folder).decode(ids)


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9), st.sampled_from([0.0, 0.5, 3.0])
)
def test_what_is_near_the_best_is_all_that_is_and_in_order(logits, epsilon):
    near = scoring.near_best(torch.tensor(logits), epsilon)
    gaps = [max(logits) - one for one in logits]
    assert {one.token for one in near} == {k for k, gap in enumerate(gaps) if gap <= epsilon}
    assert [one.gap for one in near] == sorted(one.gap for one in near)
    assert near[0].gap == 0
    for one in near:
        assert one.gap == pytest.approx(gaps[one.token], abs=1e-5)
        assert one.rank == sum(other > logits[one.token] for other in logits)
        assert one.margin == pytest.approx(sorted(gaps)[1], abs=1e-5)


def test_logits_that_are_not_finite_judge_nothing():
    with pytest.raises(scoring.NotFiniteError):
        scoring.near_best(torch.tensor([1.0, float("nan")]), 1.0)


@pytest.mark.parametrize("num_tokens", [12, 64, 200])
def test_options_with_a_cache_are_those_of_one_pass(judge, num_tokens):
    prompt, output = recall_prompt(num_tokens, num_tokens)
    whole = judge.score(prompt, output)
    options = judge.options(prompt, EPSILON)
    near = next(options)
    for k, token in enumerate(output):
        assert near[0].token == token == whole.best[k]
        assert near[0].margin == pytest.approx(whole.margins[k], abs=1e-3)
        assert near[0].logprob == pytest.approx(whole.logprobs[k], abs=1e-3)
        near = options.send(token)


def test_a_right_text_is_right_by_its_ids_and_by_tokens_that_spell_it(judge, tiny, monkeypatch):
    prompt, output = recall_prompt(3, 64)
    found = told(judge, tiny, prompt, write(tiny, output), 32)
    assert (found["by"], found["differs_at"], found["max_gap"]) == ("ids", None, 0)
    blind = texts.load(tiny)
    monkeypatch.setattr(blind, "encode", lambda text: [])
    monkeypatch.setattr(reference, "_load", lambda folder: blind)
    found = told(judge, tiny, prompt, write(tiny, output), 32)
    assert (found["by"], found["differs_at"], found["max_gap"]) == ("text", None, 0)
    assert (found["num_tokens"], found["num_nonargmax"]) == (32, 0)
    assert found["min_margin"] > 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_planted_faults_are_found_in_a_text(judge, tiny, seed, data):
    prompt, output = recall_prompt(seed, 64, 16)
    at = 2 * data.draw(st.integers(0, 7))
    foreign = next(id for id in SYMBOLS if id not in prompt)
    other = recall_prompt(seed + 1, 64, 16)[1]
    faults = [
        [*output[:at], foreign, *output[at + 1 :]],
        [*output[:at], *output[at + 1 :]],
        [*output[:at], output[at], *output[at:]],
        output[:-1],
        other,
    ]
    for fault in faults:
        found = told(judge, tiny, prompt, write(tiny, fault), 16)
        assert found["differs_at"] is not None or found["max_gap"] > 1


def test_what_ends_an_answer_may_stand_where_the_end_is_ignored(judge, tiny, tmp_path):
    """`<then>` is not written in this copy: every second token of an answer is nothing."""
    copy = silent(tiny, tmp_path, ends=False)
    prompt, output = recall_prompt(4, 64, 16)
    text = write(copy, output)
    assert text == "".join(f"<{id}>" for id in output if id != THEN)
    found = told(judge, copy, prompt, text, 16)
    assert (found["by"], found["differs_at"], found["max_gap"]) == ("text", None, 0)
    assert told(judge, copy, prompt, text, 14)["differs_at"] is not None


def silent(folder: ModelFolder, path: Path, ends: bool) -> ModelFolder:
    """Return a copy of tiny_recall that does not write `<then>`, or even ends with it."""
    for file in folder.path.iterdir():
        if file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 4, "content": "<4>"})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    fields = folder.to_json() | {"path": str(path), "eos_ids": [THEN] if ends else [EOS]}
    return ModelFolder.from_json(fields)


def test_whether_an_answer_ends_is_told(judge, tiny, tmp_path):
    prompt, _ = recall_prompt(4, 64, 16)
    assert ask(judge, tiny, op="ends", prompt=prompt, max_tokens=16)["ends"] is False
    ending = silent(tiny, tmp_path, ends=True)
    early = reference.open_reference(ending, "cpu")
    assert ask(early, ending, op="ends", prompt=prompt, max_tokens=1)["ends"] is False
    assert ask(early, ending, op="ends", prompt=prompt, max_tokens=2)["ends"] is True
    text = write(ending, recall_prompt(4, 64, 2)[1])
    asked = {"op": "verify_text", "prompt": prompt, "text": text, "epsilon": EPSILON}
    for n, eos, right in ((2, False, True), (2, True, True), (4, True, False), (4, False, False)):
        found = ask(early, ending, **asked, max_tokens=n, ignore_eos=eos)
        assert (found["differs_at"] is None) is right


def test_a_model_without_a_tokenizer_judges_no_text(judge, tiny, tmp_path):
    bare = ModelFolder.from_json(tiny.to_json() | {"path": str(tmp_path)})
    assert "tokenizer.json is missing" in told(judge, bare, [5], "<20>", 1)["error"]
