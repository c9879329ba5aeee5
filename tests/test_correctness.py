"""Outputs against the reference: per dtype, by largest gap, by budget, and against its generate."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import correctness, verdict
from headway.core import Case, Verification
from headway.correctness import TOLERANCES, first_difference
from headway.results import Generated
from headway.workload import Vocabulary, make_requests, pair_key

CASE = Case("a", "fake", "w32_16", "c4")


@pytest.mark.parametrize(
    ("got", "want", "at"),
    [
        ((), (), None),
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 2), None),
        ((1, 2), (1, 2, 3), None),
        ((9, 2, 3), (1, 2, 3), 0),
        ((1, 2, 4), (1, 2, 3), 2),
        ((1, 5, 4), (1, 2, 3), 1),
    ],
)
def test_the_first_difference(got, want, at):
    assert first_difference(got, want) == at


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_up_to_the_first_difference_two_outputs_are_the_same(got, want):
    at = first_difference(got, want)
    same = min(len(got), len(want)) if at is None else at
    assert got[:same] == want[:same]
    assert at is None or got[at] != want[at]


def judged(factory, dtype, instances=("a",), **faults):
    """Return equality of c4 in a night of engines in `dtype`, whose answers are spoilt."""
    suite = factory.make_suite(instances, dtype=dtype)
    night = factory.make_night({name: factory.Speed() for name in instances}, suite=suite)
    return verdict.judge_equality(factory.verified(night, **faults), CASE)


@pytest.mark.parametrize("gap", [1e-6, 5e-4, 2.5])
def test_in_fp32_any_other_token_is_wrong_however_small_its_gap(factory, gap):
    found = judged(factory, "float32", first_wrong=1, gap=gap)
    assert found.verdict == "WRONG"
    (finding,) = found.findings
    assert finding.reason == (
        "launch 1 request 0: token 4 is not what the reference would emit "
        f"(gap {gap:.3g} logits, exact ids are asked for)"
    )


@pytest.mark.parametrize(
    ("dtype", "gap", "expected"),
    [
        ("bfloat16", 0.25, "PASS"),
        ("bfloat16", 0.26, "WRONG"),
        ("float16", 0.10, "PASS"),
        ("float16", 0.11, "WRONG"),
    ],
)
def test_in_less_precise_dtypes_a_tie_within_epsilon_may_fall_either_way(
    factory, dtype, gap, expected
):
    found = judged(factory, dtype, first_wrong=1, gap=gap)
    assert found.verdict == expected
    if expected == "PASS":
        assert found.findings[0].reason.endswith("tokens verified, 1 ties")
    else:
        assert f"(gap {gap:g} logits, {TOLERANCES[dtype].epsilon:g} allowed)" in (
            found.findings[0].reason
        )


@pytest.mark.parametrize(("answers", "expected"), [(1, "PASS"), (32, "WRONG")])
def test_ties_have_a_budget(factory, answers, expected):
    # 2 launches of 16 requests with 16 tokens: 512 tokens, of which 11 may be ties in bf16.
    found = judged(factory, "bfloat16", first_wrong=answers, gap=0.1)
    assert found.verdict == expected
    if expected == "WRONG":
        assert "32 of 512 tokens are not the reference's, 11 allowed" in found.findings[0].reason


def test_the_budget_is_two_in_a_hundred_rounded_up(factory):
    assert judged(factory, "bfloat16", first_wrong=11, gap=0.1).verdict == "PASS"
    assert judged(factory, "bfloat16", first_wrong=12, gap=0.1).verdict == "WRONG"


def test_each_instance_is_judged_by_its_own_dtype(factory):
    night = factory.make_night()
    a, b = night.suite.instances
    b = dataclasses.replace(b, dtype="bfloat16")
    suite = dataclasses.replace(night.suite, instances=(a, b))
    # Both give the same answers, so they share every verification.
    night = factory.verified(dataclasses.replace(night, suite=suite), first_wrong=1, gap=0.2)
    verdicts = {
        name: verdict.judge_equality(night, dataclasses.replace(CASE, instance=name)).verdict
        for name in ("a", "b")
    }
    assert verdicts == {"a": "WRONG", "b": "PASS"}


def test_a_first_token_is_judged_by_dtype_as_well(factory):
    night = factory.make_night()
    key = pair_key(correctness.launch_prompt(night, "fake"), night.launches[0].first_output)
    close = Verification(
        key, num_tokens=1, max_gap=1e-4, num_nonargmax=1, nonargmax=((0, 1e-4, 1),)
    )
    night = dataclasses.replace(night, verifications={**night.verifications, key: close})
    assert "token 0" in correctness.wrong_first_tokens(night, "a")[0]
    instances = tuple(dataclasses.replace(i, dtype="float16") for i in night.suite.instances)
    suite = dataclasses.replace(night.suite, instances=instances)
    assert not correctness.wrong_first_tokens(dataclasses.replace(night, suite=suite), "a")


def test_the_largest_gap_counts_where_the_list_has_ended_before_it(factory):
    night = factory.make_night()
    cut = {
        key: dataclasses.replace(one, max_gap=3.0, num_nonargmax=2000)
        for key, one in night.verifications.items()
    }
    found = verdict.judge_equality(dataclasses.replace(night, verifications=cut), CASE)
    assert found.verdict == "WRONG"
    assert "token ? is not" in found.findings[0].reason
    assert "gap 3 logits" in found.findings[0].reason


def test_right_outputs_are_counted(factory):
    night = factory.make_night({"a": factory.Speed()}, suite=factory.make_suite(("a",)))
    found = correctness.equality(factory.verified(night, first_wrong=3), CASE)
    assert (found.num_requests, found.right, len(found.wrong)) == (32, 29, 3)
    none = correctness.equality(dataclasses.replace(night, verifications={}), CASE)
    assert (none.num_requests, none.right, len(none.unverified)) == (32, 0, 32)


def with_generated(factory, dtype, at, margins):
    """Return a night whose reference, left to itself, takes another token at `at`."""
    night = factory.make_night(
        {"a": factory.Speed()}, suite=factory.make_suite(("a",), dtype=dtype)
    )
    run = night.runs_of(CASE)[1]
    request, output = correctness.requests_of(night, run)[0], run.records[0].output_token_ids
    own = tuple(t + (k >= at) for k, t in enumerate(output))
    sample = Generated(pair_key(request.prompt_token_ids, ()), own, margins)
    return dataclasses.replace(night, generated=(sample,))


@pytest.mark.parametrize(
    ("dtype", "margins", "wrong"),
    [
        ("float32", (1.0,) * 5 + (5e-4,) + (1.0,) * 10, False),
        ("float32", (1.0,) * 5 + (5e-3,) + (1.0,) * 10, True),
        ("bfloat16", (1.0,) * 5 + (0.2,) + (1.0,) * 10, False),
        ("bfloat16", (1.0,) * 5 + (0.3,) + (1.0,) * 10, True),
        ("bfloat16", (0.0,) * 5 + (1.0,) + (0.0,) * 10, True),  # undecided, but elsewhere
        ("bfloat16", (), True),
    ],
)
def test_a_difference_from_generate_is_excused_where_the_reference_itself_is_undecided(
    factory, dtype, margins, wrong
):
    night = with_generated(factory, dtype, 5, margins)
    found = correctness.equality(night, CASE).wrong
    assert bool(found) is wrong
    if wrong:
        assert found == ("launch 1 request 0: differs from the reference's generate at token 5",)


def test_what_generate_says_too_is_right(factory):
    night = with_generated(factory, "float32", 99, ())
    assert not correctness.equality(night, CASE).wrong


@pytest.mark.parametrize("n", [1, 7, 16, 40])
def test_requests_are_those_of_the_workload_at_every_level(factory, n):
    night = factory.make_night()
    prompts = night.suite.workload("w32_16").prompts
    made = correctness.requests_for(night, CASE, n, 1)
    assert made == make_requests(prompts, n, 1, night.suite.seed, Vocabulary(64))
    assert correctness.requests_for(night, dataclasses.replace(CASE, level="c1"), n, 1) == made


def test_judging_makes_each_launch_s_prompts_once(factory):
    night = dataclasses.replace(factory.make_night(), generated=(Generated("k", (1,)),))
    correctness._made.cache_clear()
    for _ in range(2):
        factory.judge(night)
    assert correctness._made.cache_info().misses == night.suite.launches


def test_every_dtype_of_a_suite_has_a_tolerance():
    from headway.suite import DTYPES

    assert set(TOLERANCES) == set(DTYPES)
    assert all(0 < t.epsilon < math.inf for t in TOLERANCES.values())


def sampled(factory, **changes):
    """Return a verified night whose outputs are sampled, and the same night with greedy ones."""
    greedy = factory.make_night()
    (workload,) = greedy.suite.workloads
    prompts = dataclasses.replace(workload.prompts, temperature=0.7, top_p=0.9)
    suite = dataclasses.replace(
        greedy.suite, workloads=(dataclasses.replace(workload, prompts=prompts),)
    )
    return dataclasses.replace(greedy, suite=suite, **changes), greedy


def test_sampled_outputs_are_left_out_of_equality_with_the_reason(factory):
    """Wrong tokens in them are none, and right ones hold nothing: it is not a pass."""
    night, greedy = sampled(factory)
    spoilt = factory.verified(greedy, first_wrong=3).verifications
    for results in (night, dataclasses.replace(night, verifications=spoilt)):
        told = verdict.judge_equality(results, CASE)
        assert (told.verdict, told.word) == ("SKIPPED", "NOT JUDGED")
        assert told.findings[0].reason == (
            "outputs are sampled (temperature 0.7, top_p 0.9): none was verified, only greedy ones "
            "can be"
        )
        assert not told.fails(strict=True)
    wrong = dataclasses.replace(greedy, verifications=spoilt)
    assert verdict.judge_equality(wrong, CASE).verdict == "WRONG"


def test_the_reference_is_not_asked_about_sampled_outputs(factory):
    night, greedy = sampled(factory)
    assert len(list(correctness.pairs(greedy, "fake"))) > 2
    # What remains is the first token of the launches, which is greedy.
    assert [p.output for p in correctness.pairs(night, "fake")] == [(1, 2, 3)]


def test_speeds_of_sampled_outputs_are_kept_and_nothing_else_is_excused(factory):
    night, _ = sampled(factory)
    (kept, *_) = verdict.record_of(night, factory.judge(night)).cases
    assert kept.sample.cells
    assert kept.cells["greedy_equality"].verdict == "SKIPPED"
    broken, _ = sampled(factory, runs=factory.make_night({"a": factory.Speed(fails=1)}).runs)
    (lost, *_) = verdict.record_of(broken, factory.judge(broken)).cases
    assert not lost.sample.cells
