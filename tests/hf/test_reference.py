"""The verifier: numbers from logits, the protocol, and verdicts that know right from wrong."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines import models, reference
from headway.engines.models import ModelFolder, prepare, scoring
from headway.engines.models.scores import summarise
from headway.engines.models.tiny_recall.task import EOS, SYMBOLS, VOCAB_SIZE, recall_prompt

BOOT = Path(models.__file__).resolve().parents[1] / "boot.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ModelFolder:
    return prepare("tiny_recall", tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def judge(tiny) -> reference.Reference:
    return reference.open_reference(tiny, "cpu")


def ask(judge: reference.Reference, folder: ModelFolder, **request: object) -> dict[str, object]:
    return reference.answer(judge, folder, json.dumps(request))


LOGITS = torch.tensor([[1.0, 3.0, 2.5, 0.0], [5.0, 1.0, 5.0, 4.0], [0.0, 0.25, 2.0, 1.0]])


def test_gaps_of_logits_made_by_hand():
    scores = scoring.score_logits(LOGITS, [2, 2, 1])
    assert scores.gaps == [0.5, 0.0, 1.75]
    assert scores.ranks == [1, 0, 2]
    assert scores.margins == [0.5, 0.0, 1.0]
    assert (scores.best[0], scores.best[2]) == (1, 2)
    total = sum(math.exp(logit) for logit in (1.0, 3.0, 2.5, 0.0))
    assert scores.logprobs[0] == pytest.approx(2.5 - math.log(total), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_judge_nothing(bad):
    logits = LOGITS.clone()
    logits[1, 3] = bad
    with pytest.raises(scoring.NotFiniteError):
        scoring.score_logits(logits, [2, 2, 1])


def test_banned_ids_come_after_all_others():
    """The second choice is right under the ban only; a banned id is wrong by any tolerance."""
    scores = scoring.score_logits(LOGITS, [2, 0, 3], banned=[1, 2])
    assert scores.best == [0, 0, 3]
    assert scores.gaps[0] > 1e38
    assert scores.gaps[1:] == [0.0, 0.0]
    assert scores.ranks[0] == 2
    assert scores.margins == [1.0, 1.0, 1.0]
    assert all(map(math.isfinite, [*scores.gaps, *scores.logprobs]))
    assert scoring.score_logits(LOGITS, [2, 0, 3]).gaps[0] == 0.5
    summary = summarise(scores, [2, 0, 3], epsilon=100.0)
    assert (summary["first_violation"], summary["num_violations"]) == (0, 1)
    json.dumps(summary, allow_nan=False)


def test_a_model_goes_on_where_its_end_is_banned(judge):
    """As if its tenth token were its end: under the ban it says something else from there on."""
    prompt, _ = recall_prompt(8, 64)
    free = judge.generate(prompt, 32, ignore_eos=True)
    end = free[10]
    at = free.index(end)
    kept = judge.generate(prompt, 32, ignore_eos=True, banned=[end])
    assert kept[:at] == free[:at]
    assert end not in kept
    assert len(kept) == 32
    assert max(judge.score(prompt, kept, [end]).gaps) == 0.0
    assert judge.score(prompt, kept).gaps[at] > 0
    # Planted: an engine that emits the end all the same.
    assert judge.score(prompt, free, [end]).gaps[at] > 1e38


def test_the_summary_of_scores_made_by_hand():
    summary = summarise(scoring.score_logits(LOGITS, [2, 2, 1]), [2, 2, 1], epsilon=0.5)
    assert summary["num_tokens"] == 3
    assert (summary["max_gap"], summary["min_margin"]) == (1.75, 0.0)
    assert (summary["num_nonargmax"], summary["num_violations"]) == (2, 1)
    assert summary["first_violation"] == 2
    assert summary["violation"] == {"index": 2, "token": 1, "expected": 2, "gap": 1.75, "rank": 2}
    assert summary["nonargmax"] == [[0, 0.5, 1], [2, 1.75, 2]]


@given(
    st.lists(st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5), min_size=1),
    st.floats(0, 5),
    st.randoms(),
)
def test_a_summary_agrees_with_itself(rows, epsilon, rng):
    output = [rng.randrange(5) for _ in rows]
    scores = scoring.score_logits(torch.tensor(rows), output)
    summary = summarise(scores, output, epsilon)
    assert all((gap > 0) == (rank > 0) for gap, rank in zip(scores.gaps, scores.ranks, strict=True))
    assert 0 <= summary["num_violations"] <= summary["num_nonargmax"] <= summary["num_tokens"]
    assert (summary["first_violation"] is None) == (summary["max_gap"] <= epsilon)
    assert summary["min_margin"] >= 0
    assert len(summary["nonargmax"]) == summary["num_nonargmax"]
    assert summary["logprob_sum"] <= 1e-4


@pytest.mark.parametrize("num_tokens", [12, 40, 128, 256])
def test_right_answers_pass_with_wide_margins(judge, tiny, num_tokens):
    prompt, output = recall_prompt(num_tokens, num_tokens)
    answer = ask(judge, tiny, op="verify", id=1, prompt=prompt, output=output, epsilon=1e-3)
    assert (answer["id"], answer["num_tokens"], answer["num_nonargmax"]) == (1, 32, 0)
    assert answer["max_gap"] == 0
    assert answer["min_margin"] > 1
    assert answer["violation"] is None


@pytest.mark.parametrize("index", [0, 14, 30])
def test_one_wrong_token_is_found_where_it_is(judge, tiny, index):
    prompt, output = recall_prompt(5, 128)
    right = output[index]
    output[index] = next(id for id in SYMBOLS if id not in prompt)
    answer = ask(judge, tiny, op="verify", id="x", prompt=prompt, output=output, epsilon=0.5)
    assert answer["first_violation"] == index
    violation = answer["violation"]
    assert (violation["token"], violation["expected"]) == (output[index], right)
    assert violation["gap"] > 1
    assert violation["rank"] >= 1


def test_each_token_is_judged_on_the_outputs_own_prefix(judge, tiny):
    prompt, output = recall_prompt(6, 128)
    together = judge.score(prompt, output)
    for index in (0, 1, 17, 31):
        alone = judge.score([*prompt, *output[:index]], output[index : index + 1])
        assert alone.logprobs[0] == pytest.approx(together.logprobs[index], abs=1e-4)


def test_generate_is_greedy_and_passes_its_own_verdict(judge, tiny):
    prompt, expected = recall_prompt(7, 200)
    answer = ask(judge, tiny, op="generate", id=2, prompt=prompt, max_tokens=32, ignore_eos=True)
    assert (answer["id"], answer["output"]) == (2, expected)
    assert answer["margins"] == judge.score(prompt, expected).margins


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40))
def test_greedy_output_of_any_prompt_has_no_violation(judge, tiny, prompt):
    output = judge.generate(prompt, 6, ignore_eos=True)
    assert len(output) == 6
    assert summarise(judge.score(prompt, output), output, 1e-3)["num_violations"] == 0


def test_eos_ends_generation_unless_ignored(tiny):
    prompt, expected = recall_prompt(8, 64)
    model = reference.TorchReference(tiny, "cpu")
    model._eos_ids = (expected[4],)
    stopped = model.generate(prompt, 32, ignore_eos=False)
    assert stopped == expected[: expected.index(expected[4]) + 1]
    assert model.generate(prompt, 32, ignore_eos=True) == expected
    assert EOS not in expected


GOOD = {"op": "verify", "id": 9, "prompt": [0, 1], "output": [2], "epsilon": 0.1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"op": "judge"}, "op must be verify or .* generate, not 'judge'"),
        ({"output": []}, "output must be a list of at least one token id"),
        ({"prompt": []}, "prompt must be a list"),
        ({"prompt": "hello"}, "prompt must be a list"),
        ({"prompt": [0, 128]}, r"prompt\[1\] must be a token id from 0 to 127, not 128"),
        ({"output": [-1]}, r"output\[0\] .* not -1"),
        ({"output": [1.5]}, r"not 1\.5"),
        ({"output": [True]}, "not True"),
        ({"epsilon": None}, "epsilon .* not None"),
        ({"epsilon": -1}, "epsilon .* not -1"),
        ({"output": [5] * 511}, "513 tokens, more than the 512"),
        ({"op": "generate"}, "max_tokens .* not None"),
        ({"op": "generate", "max_tokens": 0}, "max_tokens .* not 0"),
        ({"op": "generate", "max_tokens": 1, "ignore_eos": 1}, "ignore_eos .* not 1"),
        ({"op": "generate", "max_tokens": 511}, "513 tokens"),
    ],
)
def test_a_request_without_an_answer_is_told_why(judge, tiny, change, complaint):
    answer = ask(judge, tiny, **{**GOOD, **change})
    assert set(answer) == {"id", "error"}
    assert answer["id"] == 9
    assert re.search(complaint, str(answer["error"]))


@pytest.mark.parametrize("line", ["{", "[]", "3"])
def test_a_line_that_is_no_request_is_answered(judge, tiny, line):
    answer = reference.answer(judge, tiny, line)
    assert answer["id"] is None
    assert answer["error"]


def talk(folder: dict[str, object], *lines: str) -> tuple[list[dict[str, object]], int, str]:
    """Run the process, say the lines, close its stdin; what it answered and how it ended."""
    command = [sys.executable, str(BOOT), "headway.engines.reference"]
    done = subprocess.run(
        [*command, "--model-json", json.dumps(folder)],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode, done.stderr


def test_the_process_answers_in_order_and_ends_with_its_input(tiny):
    prompt, output = recall_prompt(9, 64, 8)
    good = {"op": "verify", "prompt": prompt, "output": output, "epsilon": 1e-3}
    lines = [json.dumps({**good, "id": 1}), "oops", json.dumps({**good, "id": 3, "output": [9]})]
    answers, code, stderr = talk(tiny.to_json(), *lines)
    assert code == 0, stderr
    assert answers[0]["ready"] is True
    assert set(answers[0]["versions"]) >= {"torch", "transformers"}
    assert [answer["id"] for answer in answers[1:]] == [1, None, 3]
    assert [answer.get("num_violations") for answer in answers[1:]] == [0, None, 1]


def test_the_process_says_why_it_is_not_ready(tiny, tmp_path):
    answers, code, stderr = talk({**tiny.to_json(), "path": str(tmp_path)})
    assert code == 1
    assert answers[0]["ready"] is False
    assert "tiny_recall" in answers[0]["error"]
    assert stderr.rstrip().splitlines()[-1] == f"headway: {answers[0]['error']}"


def test_the_fake_model_is_judged_by_its_function():
    from headway.engines.fake import fake_tokens

    folder = ModelFolder("fake", Path("/"), "1", 100_000, (), (), 100_000)
    judge = reference.open_reference(folder, "cpu")
    right = list(fake_tokens([1, 2, 3], 6))
    wrong = [*right[:4], right[4] + 1, right[5]]
    good = {"op": "verify", "id": 1, "prompt": [1, 2, 3], "epsilon": 0.5}
    assert ask(judge, folder, **good, output=right)["max_gap"] == 0
    answer = ask(judge, folder, **good, output=wrong)
    assert (answer["num_violations"], answer["first_violation"], answer["max_gap"]) == (1, 4, 10.0)
    assert answer["violation"]["expected"] == right[4]
    generated = ask(judge, folder, op="generate", id=1, prompt=[1, 2, 3], max_tokens=6)
    assert generated["output"] == right
