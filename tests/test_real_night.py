"""A night on a real model through the shipped command: what Headway is for, end to end.

The model is tiny_recall, whose right answers are known twice: from the reference's logits, and from
the records that stand in each prompt.
"""

from __future__ import annotations

from typing import Any

import pytest

from headway import correctness, environment, night, questions
from headway.engines.models.tiny_recall.task import expected_output
from headway.workload import TINY_RECALL, Prompts, make_requests

pytestmark = pytest.mark.slow

PROMPT_TOKENS, TOKENS = 48, 8
TOP = """
[suite]
description = "tiny_recall, served by transformers"
model = "tiny_recall"
dtype = "float32"
launches = 1
seed = 1
idle_timeout_s = 30
calibrate = false

[budget]
night_minutes = 2

[engine.hf_naive]
kind = "hf_naive"
args = {{ threads = 1 }}
{engines}
[workload.recall]
prompts = "recall"
prompt_tokens = {prompt_tokens}
output_tokens = {tokens}
concurrency = {levels}
"""
STATIC = """
[engine.hf_static]
kind = "hf_static"
args = { threads = 1, max_batch = 4 }
"""
BATCHES_PAY = """
[[limit]]
metric = "output_throughput"
engine = "hf_static"
over = "hf_naive"
level = "c4"
min = 1.2
"""
# One token of all that are served is another one.
WRONG_REQUEST, WRONG_TOKEN = 4, 2
PLANTED = """
[engine.wrong]
kind = "planted:Planted"
python = "{python}"
args = {{ threads = 1, wrong_prompt = {prompt}, wrong_token = {token} }}

[engine.slow]
kind = "planted:Planted"
python = "{python}"
args = {{ threads = 1, pause_s = 0.03 }}
"""
AS_FAST = """
[[limit]]
metric = "tpot_p50"
over = "hf_naive"
max = 3.0
"""
ENGINE = '''
import time
from dataclasses import replace

from headway.engines.hf import HfNaive


class Planted(HfNaive):
    """hf_naive with one other token in its answer to one prompt, or with a pause in each step."""

    def __init__(self, folder, dtype, device, wrong_prompt=(), wrong_token=0, pause_s=0.0, **args):
        super().__init__(folder, dtype, device, **args)
        self.wrong_prompt = tuple(wrong_prompt)
        self.wrong_token = wrong_token
        self.pause_s = pause_s
        self.wrong_id = None
        self.num_tokens = 0

    def add(self, submission):
        super().add(submission)
        if submission.prompt_token_ids == self.wrong_prompt:
            self.wrong_id = submission.id

    def step(self):
        time.sleep(self.pause_s)
        (output,) = super().step()
        if output.id == self.wrong_id:
            if self.num_tokens == self.wrong_token:
                output = replace(output, token_ids=(output.token_ids[0] ^ 1,))
            self.num_tokens += 1
        return [output]
'''


@pytest.fixture
def real(workspace: Any) -> Any:
    """A workspace whose own HEADWAY_HOME has the environments that are made already."""
    environment.python_for("hf_naive")
    home = workspace.folder / "home"
    home.mkdir()
    (home / "envs").symlink_to(environment.default_home() / "envs")
    return workspace


def write(workspace: Any, name: str, engines: str, levels: str, limits: str) -> None:
    sizes = {"prompt_tokens": PROMPT_TOKENS, "tokens": TOKENS}
    text = TOP.format(engines=engines, levels=levels, **sizes) + limits
    (workspace.folder / "suites" / f"{name}.toml").write_text(text)


def test_a_night_on_a_real_model_is_verified_token_for_token(real: Any) -> None:
    write(real, "real", STATIC, "[1, 4]", BATCHES_PAY)
    done = real.run("run", "real")
    assert done.code == 0, done.text
    assert done.failed() == {}
    assert ("hf_static", "output_throughput") in done.cells("PASS")

    _, results = night.read(done.night)
    assert len({(run.case, run.launch) for run in results.runs}) == 4  # one may be replaced
    recalled = []
    for run in results.runs:
        found = correctness.equality(results, run.case)
        assert found.wrong == found.unverified == ()
        assert found.num_requests == run.level.num_requests
        assert found.num_tokens == run.level.num_requests * TOKENS
        for request, record in zip(questions.requests_of(results, run), run.records, strict=True):
            right = expected_output(request.prompt_token_ids, TOKENS)
            recalled.append(list(record.output_token_ids or ()) == right)
    assert all(recalled), f"{recalled.count(False)} of {len(recalled)} answers recall wrongly"

    before = (done.night / "journal.jsonl").read_bytes()
    again = real.run("run", "real", "--headway-run", str(done.night))
    assert again.code == 0, again.text
    assert len(again.nights) == 1
    assert (again.night / "journal.jsonl").read_bytes() == before
    assert again.cells("PASS") == done.cells("PASS")


def test_faults_planted_in_a_real_engine_are_caught(real: Any) -> None:
    python = environment.python_for("hf_naive")
    (real.folder / "planted.py").write_text(ENGINE)
    prompts = Prompts("recall", PROMPT_TOKENS, TOKENS, "recall")
    asked = make_requests(prompts, WRONG_REQUEST + 1, launch=1, seed=1, vocabulary=TINY_RECALL)
    prompt = list(asked[WRONG_REQUEST].prompt_token_ids)
    engines = PLANTED.format(python=python, prompt=prompt, token=WRONG_TOKEN)
    write(real, "planted", engines, "[1]", AS_FAST)
    done = real.run("run", "planted")
    assert done.code == 1, done.text
    assert done.cells("WRONG") == {("wrong", "greedy_equality")}
    assert done.cells("LIMIT") == {("slow", "tpot_p50")}
    assert set(done.failed()) == {
        "test_greedy_equality[wrong-recall-c1]",
        "test_tpot[slow-recall-c1]",
    }
    message = done.failed()["test_greedy_equality[wrong-recall-c1]"]
    assert f"request {WRONG_REQUEST}: token {WRONG_TOKEN} is not what the reference" in message
    assert {("hf_naive", "greedy_equality"), ("slow", "greedy_equality")} <= done.cells("PASS")
