"""Each rung of the ladder against `generate` of transformers, in float32, under load.

Each asserts that the state it is about occurred in the run whose answers it judges.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from headway.engines.contract import Submission
from headway.engines.models import ModelFolder, prepare, tiny_recall
from headway.engines.models.folder import ModelError
from headway.engines.models.loading import load
from headway.engines.models.tiny_recall.task import recall_prompt
from headway.engines.paged import Paged, weights
from headway.engines.paged.native import available
from headway.engines.paged.options import RUNGS

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 600)
Answers = Mapping[int, Sequence[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return prepare("synthetic:tiny", tmp_path_factory.mktemp("models"))


def requests(num: int, seed: int = 1, vocab_size: int = 512) -> list[Submission]:
    rng = random.Random(seed)
    return [
        Submission(
            id,
            tuple(rng.randrange(3, vocab_size) for _ in range(LENGTHS[id % len(LENGTHS)])),
            rng.randint(1, 24),
            ignore_eos=True,
        )
        for id in range(num)
    ]


@pytest.fixture(scope="module")
def right(folder: ModelFolder, greedy: Any) -> Answers:
    model = load(folder, "float32", "cpu")
    return {one.id: greedy(model, one) for one in requests(44)}


def serve(engine: Paged, asked: Sequence[Submission], at_once: int = 8) -> Answers:
    """Hand over so many a step, so that some arrive while others are at work."""
    got: dict[int, list[int]] = {one.id: [] for one in asked}
    waiting = list(asked)
    while waiting or engine.has_work():
        for submission in waiting[:at_once]:
            engine.add(submission)
        del waiting[:at_once]
        for output in engine.step():
            got[output.id] += output.token_ids
        engine.check_integrity()
    return got


def waste(stats: Mapping[str, float]) -> float:
    return 1 - stats["kv_filled_total"] / stats["kv_held_total"]


def same(folder: ModelFolder, right: Answers, **args: Any) -> Mapping[str, float]:
    # What torch compiles has a test of its own below: it takes ten seconds.
    engine = Paged(folder, "float32", "cpu", **{"cache_gib": 0.25, "compile": False, **args})
    asked = requests(len(right))
    assert serve(engine, asked) == right
    return engine.stats()


@pytest.mark.parametrize("rung", RUNGS)
def test_every_token_is_that_of_transformers(
    folder: ModelFolder, right: Answers, rung: str
) -> None:
    given = RUNGS[rung]
    if given.max_num_seqs == 1:
        right = {id: right[id] for id in range(6)}
    stats = same(folder, right, rung=rung)
    if given.contiguous:
        assert waste(stats) > 0.8  # each holds room for the longest sequence there may be
    else:
        assert waste(stats) < 0.1
        assert stats["blocks_reused_total"] > 0
    if given.chunk is not None:
        assert stats["chunked_total"] > 0
    assert (stats["mixed_total"] > 0) == given.mixed
    assert given.max_num_seqs >= stats["most_rows"] >= 20 or given.max_num_seqs == 1
    if rung == "graphs":
        assert stats["most_rows"] > 32


@pytest.mark.parametrize("rung", ["paged", "chunked", "fused32", "graphs"])
def test_a_cache_that_is_too_small_preempts_and_changes_nothing(
    folder: ModelFolder, right: Answers, rung: str
) -> None:
    stats = same(
        folder, right, rung=rung, num_blocks=60, cache_gib=None, max_model_len=900, overlap=True
    )
    assert stats["preemptions_total"] > 0
    assert waste(stats) < 0.1


def test_prompts_that_were_seen_are_found_and_answered_alike(
    folder: ModelFolder, right: Answers
) -> None:
    engine = Paged(folder, "float32", "cpu", prefix_caching=True, cache_gib=0.25, compile=False)
    asked = requests(len(right))
    for _ in range(2):
        assert serve(engine, asked) == right
    stats = engine.stats()
    assert stats["prefix_hits_total"] > 0.4 * stats["prefix_queries_total"]


@pytest.mark.parametrize(
    "args", [{"attention": "plain"}, {"attention": "sdpa"}, {"kernels": "native"}], ids=str
)
def test_each_attention_and_the_compiled_operations_give_the_same(
    folder: ModelFolder, right: Answers, args: Mapping[str, str]
) -> None:
    if "kernels" in args and available()[0] is None:
        pytest.skip(f"needs the compiled kernels: {available()[1]}")
    same(folder, {id: right[id] for id in range(11)}, **args)


@pytest.mark.parametrize("rung", ["flash32", "graphs"])
def test_recall_in_bfloat16(rung: str) -> None:
    """Whole answers are known beforehand; of 960 the reference itself gets one wrong in bf16."""
    engine = Paged(tiny_recall.prepare(), "bfloat16", "cpu", rung=rung, cache_gib=0.1)
    tasks = [recall_prompt(seed, 30 + 7 * seed) for seed in range(40)]
    asked = [
        Submission(id, tuple(prompt), 24, ignore_eos=True) for id, (prompt, _) in enumerate(tasks)
    ]
    got = serve(engine, asked)
    assert sum(got[id] == right[:24] for id, (_, right) in enumerate(tasks)) >= 39
    settings = engine.info.settings
    if rung == "flash32":
        assert settings["attention"] == ("native" if available()[0] else "sdpa")
    else:
        assert (settings["kernels"], settings["decode_step"]) in (
            ("native", "native"),
            ("torch", "compiled"),  # without AVX512-BF16, or without a compiler of ours
        )


@pytest.mark.parametrize("family", weights.FAMILIES)
@pytest.mark.parametrize("rung", ["paged", "graphs"])
def test_families_of_models(invented: Any, family: str, rung: str, greedy: Any) -> None:
    folder = invented(family)
    asked = requests(11, vocab_size=300)
    engine = Paged(folder, "float32", "cpu", rung=rung, cache_gib=0.1, compile=False)
    model = load(folder, "float32", "cpu")
    assert serve(engine, asked) == {one.id: greedy(model, one) for one in asked}


@pytest.mark.usefixtures("compiler")
def test_steps_that_torch_compiles_under_load(invented: Any, greedy: Any) -> None:
    folder = invented("qwen2", num_hidden_layers=2)
    engine = Paged(folder, "float32", "cpu", kernels="torch", cache_gib=0.1, overlap=True)
    assert engine.info.settings["decode_step"] == "compiled"
    model, asked = load(folder, "float32", "cpu"), requests(44, vocab_size=300)
    # Drawn from one token, which is the largest: what is drawn goes through the same steps.
    asked = [replace(one, temperature=one.id % 3, top_p=1e-9) for one in asked]
    assert serve(engine, asked) == {one.id: greedy(model, one) for one in asked}
    assert engine.stats()["most_rows"] > 32


def test_a_model_it_cannot_serve_is_refused(folder: ModelFolder) -> None:
    model = load(folder, "float32", "cpu")
    model.config.model_type = "mistral"
    with pytest.raises(ModelError, match="llama, qwen2, qwen3 models, not 'mistral'"):
        weights.read(model, fused=False)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"rung": "top"}, "rung must be one of no_cache, kv_cache, continuous"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"num_blocks": 4, "cache_gib": 1.0}, "give cache_gib or num_blocks, not both"),
        ({"cache_gib": -1}, "cache_gib must be above 0"),
        ({"max_model_len": 4096}, "max_model_len is 4096, the model's context 2048"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "at least max_num_seqs, 9"),
        ({"cache_gib": 1e-6}, "one sequence may have 2048: give cache_gib more"),
        ({"rung": "continuous", "prefix_caching": True}, "it has no prefix caching"),
        ({"rung": "no_cache", "overlap": True}, "reads each token back"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    folder: ModelFolder, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Paged(folder, "float32", "cpu", **args)


def test_a_request_that_never_fits_is_refused(folder: ModelFolder) -> None:
    engine = Paged(folder, "float32", "cpu", num_blocks=4, max_model_len=200, compile=False)
    engine.add(Submission(0, (5,) * 60, 4))
    with pytest.raises(ValueError, match="are 65 tokens, and 64 are the most that fit"):
        engine.add(Submission(1, (5,) * 60, 5))


def test_its_parts_are_timed_and_said(folder: ModelFolder) -> None:
    engine = Paged(folder, "float32", "cpu", profile=True, cache_gib=0.1)
    serve(engine, requests(5))
    stats = engine.stats()
    parts = [stats[f"{name}_s_total"] for name in ("weights", "attention", "rest", "host")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(stats["step_s_total"])
    settings = engine.info.settings
    assert settings["max_num_seqs"] == 512
    assert settings["cache_bytes"] == pytest.approx(0.1 * 2**30, rel=0.01)


def test_a_rungs_rows_and_pool_can_be_given(folder: ModelFolder) -> None:
    given = {"max_num_seqs": 3, "num_blocks": 99, "max_model_len": 700, "compile": False}
    engine = Paged(folder, "float32", "cpu", **given)
    asked = [replace(one, max_tokens=2) for one in requests(8)]
    assert all(len(tokens) == 2 for tokens in serve(engine, asked).values())
    assert engine.stats()["most_rows"] <= 3
