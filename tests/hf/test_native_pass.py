"""The compiled attention and the compiled pass against torch's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headway.engines.models import default_home, prepare
from headway.engines.models.loading import fill_with_noise, load
from headway.engines.paged import native, weights
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.batch import Batch, Cache, RowPlan, build
from headway.engines.paged.model import Decoder, new_cache
from headway.engines.paged.native.library import Library
from headway.engines.paged.ops import TorchOps

LIBRARY, REASON = native.available()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=str(REASON))

# What one rounding to bf16 can move a value by, as a part of it.
ROUNDING = 2.0**-8


def library() -> Library:
    assert LIBRARY is not None
    return LIBRARY


def noise(seed: int, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def poisoned(cache: Cache, batch: Batch) -> Cache:
    """Return the cache with NaN wherever no row of the batch has a token."""
    kept = torch.zeros(cache.num_blocks, cache.block_size, dtype=torch.bool)
    for row, length in enumerate(batch.lengths):
        for place in range(length):
            block, offset = divmod(place, cache.block_size)
            kept[batch.block_tables[row, block], offset] = True
    parts = [part.clone() for part in (cache.keys, cache.values)]
    for part in parts:
        part[:, ~kept] = float("nan")
    return Cache(*parts)


def plan_rows(rng: random.Random, block_size: int, most: int) -> tuple[list[RowPlan], int]:
    """Return rows that decode, then parts of prompts, on blocks in no order; and all blocks."""
    lengths = [
        rng.choice([1, 2, block_size, block_size + 1, 63, 64, 65, rng.randint(1, most)])
        for _ in range(rng.choice([1, 2, 5, 33]))
    ]
    decodes = rng.randint(0, len(lengths))
    needed = sum(-(-length // block_size) for length in lengths)
    blocks = rng.sample(range(needed + 3), needed)
    rows = []
    for row, length in enumerate(lengths):
        count = 1 if row < decodes else rng.randint(1, length)
        table = [blocks.pop() for _ in range(-(-length // block_size))]
        ids = [rng.randrange(100) for _ in range(count)]
        rows.append(RowPlan(ids, length - count, table, row < decodes or rng.random() < 0.7))
    return rows, needed + 3


@settings(max_examples=30, deadline=None, database=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1 << 30),
    st.sampled_from([1, 4, 16, 512]),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([16, 18, 32, 40, 64, 80, 96, 128]),
)
def test_attention(
    dtype: torch.dtype, seed: int, block_size: int, kv_heads: int, group: int, dim: int
) -> None:
    rows, num_blocks = plan_rows(random.Random(seed), block_size, 150)
    batch = build(rows, block_size)
    sizes = (1, num_blocks, block_size, kv_heads, dim)
    cache = Cache(noise(seed, *sizes).to(dtype), noise(seed + 1, *sizes).to(dtype))
    q = noise(seed + 2, batch.num_tokens, kv_heads * group, dim).to(dtype)
    exact = [part.float() for part in cache.layers()[0]]
    wanted = Plain()(q.float(), *exact, batch, dim**-0.5)
    attention = native.NativeAttention(library())
    view = torch.cat((q, q), dim=1)[:, : kv_heads * group]  # as q is a part of QKV
    found = attention(view, *poisoned(cache, batch).layers()[0], batch, dim**-0.5)
    # Weights and result are rounded: an error of each value seen, not of their sum.
    near = 2e-5 if dtype == torch.float32 else 2 * ROUNDING * float(exact[1].abs().max())
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=near, equal_nan=False)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("length", [511, 512, 1500])
def test_a_long_context_is_divided(threads: int, length: int) -> None:
    """Scores are wide, so that the parts' largest differ by far."""
    batch = build([RowPlan([1], length - 1, range(length), True)], 1)
    keys, values = (noise(i, length, 1, 2, 32) for i in range(2))
    q, before = noise(2, 1, 6, 32) * 10, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native.NativeAttention(library())(q, keys, values, batch, 1.0)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, Plain()(q, keys, values, batch, 1.0), rtol=1e-4, atol=1e-4)


SIZES = {
    "hidden_size": 96, "intermediate_size": 152, "num_hidden_layers": 3, "vocab_size": 203,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
    "recall": lambda: load(prepare("tiny_recall", default_home()), "bfloat16", "cpu"),
}


def read(name: str, fused: bool, dtype: torch.dtype = torch.bfloat16) -> weights.Weights:
    model = MODELS[name]()
    if name != "recall":
        fill_with_noise(model, 1)
        for kind, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases and norms that a mistake would show in
                parameter.detach().add_(noise(len(kind), len(parameter)) * 0.2)
    return weights.read(model.bfloat16().to(dtype).eval(), fused)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "fused"),
    [("llama", True), ("qwen2", True), ("qwen2", False), ("qwen3", True), ("recall", False)],
)
def test_a_pass_is_as_exact_as_torch(name: str, fused: bool) -> None:
    """The truth is fp32 on the same weights; torch's bf16 says how far off bf16 is."""
    shared, exact = read(name, fused), read(name, fused, torch.float32)
    rng, block_size = random.Random(name), 4
    errors = torch.zeros(2)
    for turn in range(3):
        rows, num_blocks = plan_rows(rng, block_size, 100)
        rows = [replace(row, ids=[i % shared.shape.vocab_size for i in row.ids]) for row in rows]
        batch = build(rows, block_size)
        if not len(batch.last):
            continue
        truth = new_cache(exact.shape, num_blocks, block_size, exact.embedding)
        for part in (truth.keys, truth.values):
            part.copy_(noise(turn, *part.shape).bfloat16())
        caches = [Cache(truth.keys.bfloat16(), truth.values.bfloat16()) for _ in range(2)]
        wanted = Decoder(exact, TorchOps(), Plain()).hidden(batch, truth.layers())
        usual = Decoder(shared, TorchOps(), Plain()).hidden(batch, caches[0].layers())
        step = native.Step(library(), shared, poisoned(caches[1], batch))
        found = step(batch, want_hidden=True)
        errors += torch.stack([(x.float() - wanted).pow(2).mean() for x in (found, usual)])
        logits = (found @ shared.head.T).float()
        chosen = step(batch)
        largest = logits.max(dim=-1).values
        near = largest.abs() * 2 * ROUNDING
        assert (logits.gather(1, chosen[:, None])[:, 0] >= largest - near).all()
    assert errors[0] <= 1.1 * errors[1]


def tiny_step(**changed: Tensor) -> tuple[native.Step, Cache]:
    model = replace(read("llama", True), **changed)
    cache = new_cache(model.shape, 8, 4, model.embedding)
    return native.Step(library(), model, cache), cache


@torch.no_grad()
def test_of_equal_logits_the_first_is_taken() -> None:
    """All rows of the head are one, so that all logits tie; over threads as well."""
    head = noise(0, 1, 96).expand(203, 96).bfloat16().contiguous()
    step, _ = tiny_step(head=head)
    assert step(build([RowPlan([5], 2, [1], True)] * 3, 4)).tolist() == [0, 0, 0]
    head = head.clone()
    head[[77, 150, 202]] *= torch.tensor([[1.5]], dtype=torch.bfloat16)
    step, _ = tiny_step(head=head)
    batch = build([RowPlan([5], 2, [1], True), RowPlan([9], 0, [2], True)], 4)
    signs = (step(batch, want_hidden=True).float() @ head[0].float()).sign()
    wanted = [77 if sign > 0 else 0 for sign in signs.tolist()]
    assert step(batch).tolist() == wanted


def test_a_step_fills_the_cache_and_nothing_else() -> None:
    step, cache = tiny_step()
    step(build([RowPlan([5], 6, [3, 1], True), RowPlan([7, 8, 9], 0, [4], False)], 4))
    written = cache.keys[1].flatten(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == [1 * 4 + 2, 4 * 4, 4 * 4 + 1, 4 * 4 + 2]


BATCH = build([RowPlan([5], 6, [3, 1], True), RowPlan([7], 2, [2], True)], 4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ids", torch.tensor([5, 203]), "names what is not there"),
        ("ids", torch.tensor([5, -1]), "names what is not there"),
        ("positions", torch.tensor([6, 256]), "names what is not there"),
        ("slots", torch.tensor([6, 32]), "names what is not there"),
        ("last", torch.tensor([0, 2]), "names what is not there"),
        ("block_tables", torch.tensor([[3, 8], [2, 0]], dtype=torch.int32), "names what is not"),
        ("block_tables", torch.tensor([[3], [2]], dtype=torch.int32), "hold no 7 tokens"),
        ("block_tables", torch.tensor([[3, 1], [2, 0]]), "torch.int32"),
        ("ids", torch.tensor([5, 0, 6, 0])[::2], "contiguous"),
        ("starts", (0, 1), "a start for each row"),
        ("starts", (0, 2, 2), "names what is not there"),
    ],
)
def test_what_is_not_there_is_refused(field: str, value: object, message: str) -> None:
    step, cache = tiny_step()
    with pytest.raises(ValueError, match=message):
        step(replace(BATCH, **{field: value}))
    assert not cache.keys.any()


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        native.Step(library(), read("llama", True, torch.float32), tiny_step()[1])
