"""The compiled kernels against the same operations in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.engines.paged import native
from headway.engines.paged.native import kernels
from headway.engines.paged.native.library import Library
from headway.engines.paged.ops import TorchOps

LIBRARY, REASON = native.available()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=str(REASON))

# What one rounding to bf16 can move a value by, as a part of it.
ROUNDING = 2.0**-8
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 1 << 30)
quick = settings(max_examples=40, deadline=None, database=None)


def library() -> Library:
    assert LIBRARY is not None
    return LIBRARY


def ops() -> native.NativeOps:
    return native.NativeOps(library())


def noise(seed: int, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, wanted: Tensor, roundings: int) -> None:
    """Compare with what fp32 gives on the same inputs; bf16 was rounded so many times."""
    exact = found.dtype == torch.float32
    near = 2e-6 if exact else roundings * ROUNDING
    torch.testing.assert_close(found.float(), wanted, rtol=near, atol=near, equal_nan=False)


def strided(x: Tensor, gap: int) -> Tensor:
    """Return x as a view with a row stride of its own, NaN in the gaps."""
    flat = x.flatten(1)
    wide = torch.full((len(x), flat.shape[1] + gap), float("nan"), dtype=x.dtype)
    wide[:, : flat.shape[1]] = flat
    return wide[:, : flat.shape[1]].unflatten(1, x.shape[1:])


@quick
@given(DTYPES, SEEDS, st.integers(1, 70), st.integers(1, 130), st.integers(0, 5))
def test_norms(dtype: torch.dtype, seed: int, rows: int, size: int, gap: int) -> None:
    x, residual = (noise(seed + i, rows, size).to(dtype) for i in range(2))
    weight = noise(seed + 2, size).to(dtype)
    wanted = TorchOps().rms_norm(x.float(), weight.float(), 1e-5)
    assert_near(ops().rms_norm(strided(x, gap), weight, 1e-5), wanted, 2)
    total = (x.float() + residual.float()).to(dtype)
    wanted = TorchOps().rms_norm(total.float(), weight.float(), 1e-5)
    assert_near(ops().add_rms_norm(strided(x, gap), residual, weight, 1e-5), wanted, 2)
    assert torch.equal(residual, total)


@quick
@given(DTYPES, SEEDS, st.integers(1, 40), st.integers(1, 5), st.integers(1, 64))
def test_norms_of_heads(dtype: torch.dtype, seed: int, rows: int, heads: int, half: int) -> None:
    x, weight = noise(seed, rows, heads, 2 * half).to(dtype), noise(seed + 1, 2 * half).to(dtype)
    wanted = TorchOps().rms_norm(x.float(), weight.float(), 1e-6)
    assert_near(ops().rms_norm(strided(x, 6), weight, 1e-6), wanted, 2)


@quick
@given(DTYPES, SEEDS, st.integers(1, 70), st.integers(1, 200), st.integers(0, 5))
def test_silu_mul(dtype: torch.dtype, seed: int, rows: int, size: int, gap: int) -> None:
    gate, up = (noise(seed + i, rows, size).mul(8).to(dtype) for i in range(2))
    wanted = TorchOps().silu_mul(gate.float(), up.float())
    assert_near(ops().silu_mul(strided(gate, gap), strided(up, gap + 1)), wanted, 1)


def test_silu_at_the_ends() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    assert_near(ops().silu_mul(gate, torch.ones_like(gate)), torch.nn.functional.silu(gate), 0)


@quick
@given(DTYPES, SEEDS, st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.integers(8, 64))
def test_rotate_and_write(
    dtype: torch.dtype, seed: int, tokens: int, heads: int, kv_heads: int, half: int
) -> None:
    q, k, v = (
        strided(noise(seed + i, tokens, n, 2 * half).to(dtype), 4)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    angles = noise(seed + 3, tokens, half) * 100
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(seed))[:tokens]
    wide = [torch.full((3, tokens, kv_heads, 2 * half), 7.0) for _ in range(2)]
    caches = [cache.to(dtype) for cache in wide]
    wanted = TorchOps().rotate_write(q.float(), k.float(), v.float(), cos, sin, slots, *wide)
    assert_near(ops().rotate_write(q, k, v, cos, sin, slots, *caches), wanted, 1)
    for found, cache in zip(caches, wide, strict=True):
        assert_near(found, cache, 1)


@quick
@given(DTYPES, SEEDS, st.integers(1, 9), st.integers(1, 3000))
def test_argmax_is_the_first(dtype: torch.dtype, seed: int, rows: int, size: int) -> None:
    logits = noise(seed, rows, size).mul(3).round().to(dtype)  # of few values: many ties
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert ops().argmax(strided(logits, 3)).tolist() == wanted


@quick
@given(
    SEEDS,
    st.integers(1, 33) | st.just(200),
    st.integers(1, 150),
    st.integers(1, 100),
    st.booleans(),
)
def test_product(seed: int, rows: int, n: int, half: int, biased: bool) -> None:
    x, weight = (noise(seed + i, m, 2 * half).bfloat16() for i, m in enumerate((rows, n)))
    bias = noise(seed + 2, n).bfloat16() if biased else None
    packed = kernels.PackedLinear(ops().packer, weight, bias)
    wanted = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    found = packed(strided(x, 2))
    near = ROUNDING * wanted.abs() + 1e-5 * (x.double().abs() @ weight.double().abs().T)
    assert ((found.double() - wanted).abs() <= near).all()
    linear = ops().pack(weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(linear(x.float()), wanted.float(), rtol=1e-4, atol=1e-3)


def test_kernels_refuse_what_they_cannot_read() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        ops().rms_norm(x.half(), torch.ones(4).half(), 1e-5)
    with pytest.raises(ValueError, match=r"norm's weight is .* \(3,\)"):
        ops().rms_norm(x, torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="the residual must be contiguous"):
        ops().add_rms_norm(x, torch.ones(2, 8)[:, ::2], torch.ones(4), 1e-5)
