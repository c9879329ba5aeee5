"""Decode steps that torch compiles, against the same model step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config

from headway.engines.models.loading import load
from headway.engines.paged import Paged, weights
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.batch import Batch, RowPlan, build
from headway.engines.paged.compiled import CompiledDecode
from headway.engines.paged.model import Decoder, new_cache
from headway.engines.paged.ops import TorchOps

BLOCK, BLOCKS = 16, 64


def decoding(rng: random.Random, rows: int, longest: int) -> Batch:
    """Rows at places of their own in the cache, all of it full of something."""
    free = rng.sample(range(BLOCKS), BLOCKS)
    plans = []
    for _ in range(rows):
        length = rng.randint(1, longest)
        table = [free.pop() for _ in range(-(-length // BLOCK))]
        plans.append(RowPlan([rng.randrange(300)], length - 1, table, ends=True))
    return build(plans, BLOCK)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_step_is_that_of_the_model(invented: Any, family: str) -> None:
    folder = invented(family, num_hidden_layers=2)
    read = weights.read(load(folder, "float32", "cpu"), fused=True)
    # Each logit is there twice: of two that are largest the first is the one.
    read = replace(read, head=torch.cat((read.head[:150], read.head[:150])))
    truth, cache = (new_cache(read.shape, BLOCKS + 1, BLOCK, read.embedding) for _ in range(2))
    rng, plain = random.Random(3), Decoder(read, TorchOps(), Plain())
    batches = [decoding(rng, rows, most) for rows in (1, 2, 3, 9) for most in (1, 16, 40, 100)]
    counters.clear()
    with torch.no_grad():
        step = CompiledDecode(read, cache)
        for mine, right in ((cache.keys, truth.keys), (cache.values, truth.values)):
            mine.copy_(right.normal_(generator=torch.manual_seed(1)))
        for batch in batches:
            hidden = plain.hidden(batch, truth.layers())
            wanted = plain.logits(hidden)[:, :150].argmax(dim=-1)
            tokens, made = step(batch)
            assert torch.equal(tokens, wanted)
            torch.testing.assert_close(made, hidden, atol=1e-3, rtol=1e-3)
            elsewhere = replace(batch, ids=batch.ids.new_zeros(batch.num_rows))
            assert torch.equal(step(elsewhere, ids=batch.ids)[0], wanted)
            torch.testing.assert_close(cache.keys, truth.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(cache.values, truth.values, atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 2, "some sizes were compiled for again"


def test_without_a_compiler_steps_are_eager_and_it_is_said(
    invented: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = invented("qwen2")
    args: dict[str, Any] = {"kernels": "torch", "cache_gib": 0.1}
    chosen = Paged(folder, "float32", "cpu", compile=False, **args)
    assert chosen.info.settings["decode_step"] == "eager"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        with pytest.warns(UserWarning, match="not compiled: InvalidCxxCompiler: .*/nowhere/c"):
            engine = Paged(folder, "float32", "cpu", **args)
    assert engine.info.settings["decode_step"] == "eager"
    assert engine.info.settings["compile"] is True
