"""Our engines against `generate` of transformers on one request at a time, in float32."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.engines import boot
from headway.engines.contract import Engine, Output, Submission
from headway.engines.hf import HfNaive, HfStatic
from headway.engines.hf import model as passes
from headway.engines.models import ModelFolder, prepare
from headway.engines.models.loading import load
from headway.engines.paged import Paged
from headway.engines.sampling import Sampler

ENGINES = {"hf_naive": HfNaive, "hf_static": HfStatic, "paged": Paged}
ARGS = {
    "hf_static": {"batch_wait_s": 0.0},
    "paged": {"num_blocks": 1024, "max_num_seqs": 8, "compile": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return prepare("synthetic:tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def generate(folder: ModelFolder, greedy: Any) -> Callable[[Submission], list[int]]:
    model = load(folder, "float32", "cpu")
    return lambda one: greedy(model, one, () if one.ignore_eos else folder.eos_ids)


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest, folder: ModelFolder) -> Engine:
    return build(request.param, folder)


def build(kind: str, folder: ModelFolder) -> Engine:
    return ENGINES[kind](folder, "float32", "cpu", **ARGS.get(kind, {}))


def submissions(folder: ModelFolder, lengths: Sequence[int], seed: int = 0) -> list[Submission]:
    rng = random.Random(seed)
    return [
        Submission(
            id=id,
            prompt_token_ids=tuple(rng.randrange(folder.vocab_size) for _ in range(length)),
            max_tokens=rng.randint(1, 20),
            ignore_eos=True,
        )
        for id, length in enumerate(lengths)
    ]


def drain(engine: Engine, steps: int = 10_000) -> list[Output]:
    outputs = []
    while engine.has_work() and steps > 0:
        outputs += engine.step()
        steps -= 1
    return outputs


def tokens_of(outputs: Sequence[Output], id: int) -> list[int]:
    return [token for output in outputs if output.id == id for token in output.token_ids]


def test_greedy_tokens_are_those_of_generate(
    engine: Engine, folder: ModelFolder, generate: Callable[[Submission], list[int]]
) -> None:
    asked = submissions(folder, [1, 2, 7, 31, 32, 33, 64, 5, 17, 1])
    for submission in asked:
        engine.add(submission)
    outputs = drain(engine)
    assert not engine.has_work()
    for submission in asked:
        assert tokens_of(outputs, submission.id) == generate(submission)
        mine = [output for output in outputs if output.id == submission.id]
        assert [output.finish_reason for output in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"


def test_a_second_wave_is_not_touched_by_the_first(
    engine: Engine, folder: ModelFolder, generate: Callable[[Submission], list[int]]
) -> None:
    for wave in range(2):
        asked = submissions(folder, [9, 3, 20], seed=wave)
        for submission in asked:
            engine.add(submission)
        outputs = drain(engine)
        for submission in asked:
            assert tokens_of(outputs, submission.id) == generate(submission)


def test_aborts_leave_the_others_alone(
    engine: Engine, folder: ModelFolder, generate: Callable[[Submission], list[int]]
) -> None:
    asked = [
        replace(s, max_tokens=12) for s in submissions(folder, [4, 30, 11, 8, 15, 2, 9, 21, 6])
    ]
    for submission in asked:
        engine.add(submission)
    outputs = drain(engine, steps=5)
    aborted = {0, 3, 8}  # in work; in work or waiting; waiting in either engine
    for id in aborted:
        engine.abort(id)
    engine.abort(12345)
    after = drain(engine)
    assert not aborted & {output.id for output in after}
    for submission in asked:
        if submission.id not in aborted:
            assert tokens_of(outputs + after, submission.id) == generate(submission)


def test_aborting_everything_leaves_no_work(engine: Engine, folder: ModelFolder) -> None:
    for submission in submissions(folder, [4, 30, 11]):
        engine.add(replace(submission, max_tokens=12))
    engine.step()
    for id in range(3):
        engine.abort(id)
    assert not engine.has_work()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_eos_ends_an_answer_unless_it_is_ignored(
    engine: Engine, folder: ModelFolder, generate: Callable[[Submission], list[int]]
) -> None:
    # Make an id that the model really emits the end, and the engine's own view of it the same.
    submission = replace(submissions(folder, [12])[0], max_tokens=10)
    greedy = generate(submission)
    eos = greedy[4]
    first = greedy.index(eos)
    engine = build(engine.info.kind, replace(folder, eos_ids=(eos,)))
    engine.add(submission)
    engine.add(replace(submission, id=1, ignore_eos=False))
    outputs = drain(engine)
    assert tokens_of(outputs, 0) == greedy
    assert tokens_of(outputs, 1) == greedy[: first + 1]
    assert [output.finish_reason for output in outputs if output.id == 1][-1] == "stop"


def test_samples_depend_on_the_seed_and_not_on_the_neighbours(
    engine: Engine, folder: ModelFolder
) -> None:
    base = submissions(folder, [10, 3])
    sampled = replace(base[0], max_tokens=16, temperature=1.5, top_p=0.9, seed=7)
    for submission in (sampled, replace(sampled, id=2), replace(sampled, id=3, seed=8), base[1]):
        engine.add(submission)
    outputs = drain(engine)
    alone = drain_one(engine, sampled)
    assert tokens_of(outputs, 0) == tokens_of(outputs, 2) == alone
    assert tokens_of(outputs, 3) != alone


def drain_one(engine: Engine, submission: Submission) -> list[int]:
    engine.add(submission)
    return tokens_of(drain(engine), submission.id)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    sampler = Sampler(1.0, 0.6, torch.Generator().manual_seed(0))
    assert {int(sampler.draw(logits)) for _ in range(300)} == {1, 3}
    cold = replace(sampler, temperature=1e-30, top_p=1.0)
    assert {int(cold.draw(logits)) for _ in range(20)} == {1}


def test_the_first_of_equal_logits_is_chosen() -> None:
    logits = torch.zeros(2, 50_000, dtype=torch.bfloat16)
    logits[0, [30_000, 17, 49_999]] = 1.0
    rows = [passes.Row(Submission(id, (1,), 1), None) for id in range(2)]
    assert passes.choose(logits, rows) == [17, 0]


def test_padding_does_not_count_as_a_position(folder: ModelFolder) -> None:
    # A rotary embedding sees differences only; a learned one would not forgive this.
    model = passes.load_model(folder, "float32", "cpu", "sdpa", None)
    passed, _ = passes.prefill(model, [[1, 2, 3], [4]])
    assert passed.positions.tolist() == [[3], [1]]
    passes.decode(model, passed, [5, 6])
    assert passed.positions.tolist() == [[4], [2]]


def test_a_static_batch_holds_rows_that_ended_and_waits_to_fill(folder: ModelFolder) -> None:
    engine = HfStatic(folder, "float32", "cpu", max_batch=2, batch_wait_s=1000.0)
    short, long, third = submissions(folder, [3, 5, 4])
    engine.add(replace(short, max_tokens=1))
    assert engine.step() == []  # half a batch, and its wait is not over
    engine.add(replace(long, max_tokens=3))
    engine.add(third)
    assert {output.id for output in engine.step()} == {0, 1}
    assert engine.stats() == {"running": 1, "waiting": 1, "held_rows": 1}
    assert [output.id for output in drain(engine, steps=2)] == [1, 1]
    assert engine.stats() == {"running": 0, "waiting": 1, "held_rows": 0}


def test_naive_serves_in_order_one_at_a_time(folder: ModelFolder) -> None:
    engine = HfNaive(folder, "float32", "cpu")
    for submission in submissions(folder, [6, 2, 4]):
        engine.add(submission)
    order = [output.id for output in drain(engine)]
    assert order == sorted(order)


def test_step_times_are_positive_and_repeat_on_the_same_cache(
    engine: Engine, folder: ModelFolder
) -> None:
    assert engine.time_step("prefill", 1, 16) > 0
    assert engine.time_step("decode", 1, 16) > 0
    if engine.info.kind == "paged":
        assert engine.stats()["kv_used_blocks"] == 0
        return
    cache = engine._timer._prepared[2].cache  # type: ignore[attr-defined]
    assert cache.get_seq_length() == 16
    assert engine.time_step("decode", 1, 16) > 0
    assert engine._timer._prepared[2].cache is cache  # type: ignore[attr-defined]
    assert cache.get_seq_length() == 16
    assert not engine.has_work()


@pytest.mark.parametrize(("batch", "length"), [(9, 4), (0, 4), (1, 10**9)])
def test_a_step_that_does_not_fit_is_refused(engine: Engine, batch: int, length: int) -> None:
    with pytest.raises(ValueError, match=str(batch) if batch != 1 else str(length)):
        engine.time_step("decode", batch, length)


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("hf_naive", {"max_batch": 8}, r"hf_naive has no argument 'max_batch'; it takes: threads"),
        ("hf_static", {"max_bach": 8}, r"'max_bach'; it takes: max_batch, batch_wait_s"),
        ("hf_static", {"max_batch": "8"}, r"max_batch must be a whole number, not '8'"),
        ("hf_static", {"max_batch": 0}, r"max_batch must be at least 1, not 0"),
        ("hf_static", {"batch_wait_s": -1}, r"batch_wait_s must be 0 or more"),
    ],
)
def test_wrong_arguments_are_named(
    folder: ModelFolder, kind: str, args: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ENGINES[kind](folder, "float32", "cpu", **args)


def test_info_is_read_back(folder: ModelFolder) -> None:
    info = HfStatic(folder, "bfloat16", "cpu", max_batch=3, attention="eager").info
    assert (info.kind, info.dtype, info.device) == ("hf_static", "bfloat16", "cpu")
    assert info.settings["max_batch"] == 3
    assert info.settings["attention"] == "eager"
    assert info.versions["torch"] == torch.__version__


@pytest.fixture
def served(folder: ModelFolder) -> Iterator[str]:
    """A real host process on `folder`; its URL."""
    command = [sys.executable, boot.__file__, "headway.engines.host", "hf_static", "--port", "0"]
    command += ["--model-json", json.dumps(folder.to_json()), "--served-name", "tiny"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        match = re.search(r"http://\S+", process.stderr.readline())
        yield match[0] if match else "no URL on stderr"
        process.terminate()
    assert process.returncode == 0


def test_served_tokens_are_those_of_generate(
    served: str, folder: ModelFolder, generate: Callable[[Submission], list[int]]
) -> None:
    submission = submissions(folder, [13])[0]
    body = {
        "model": "tiny",
        "prompt": submission.prompt_token_ids,
        "max_tokens": submission.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    wait_until_ready(served)
    with urllib.request.urlopen(f"{served}/v1/completions", json.dumps(body).encode()) as answer:
        choice = json.load(answer)["choices"][0]
    assert choice["token_ids"] == generate(submission)


def wait_until_ready(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/health").close()
            return
        time.sleep(0.1)
    pytest.fail("the host is not ready after a minute")


def test_importing_the_host_imports_no_torch() -> None:
    code = "import sys, headway.engines.host.__main__; sys.exit('torch' in sys.modules)"
    script = Path(boot.__file__)
    runner = f"import runpy; runpy.run_path({str(script)!r}); {code}"
    assert subprocess.run([sys.executable, "-c", runner], check=False).returncode == 0
