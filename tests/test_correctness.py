"""Outputs against the reference: per dtype, by largest gap, by budget, and against its generate."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import correctness, questions, verdict
from headway.core import Capabilities, Case, Verification
from headway.correctness import TOLERANCES, first_difference
from headway.engines import fake, reference
from headway.engines.models.folder import ModelFolder
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
    key = pair_key(questions.launch_prompt(night, "fake"), night.launches[0].first_output)
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
    request, output = questions.requests_of(night, run)[0], run.records[0].output_token_ids
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
    made = questions.requests_for(night, CASE, n, 1)
    assert made == make_requests(prompts, n, 1, night.suite.seed, Vocabulary(64))
    assert questions.requests_for(night, dataclasses.replace(CASE, level="c1"), n, 1) == made


def test_judging_makes_each_launch_s_prompts_once(factory):
    night = dataclasses.replace(factory.make_night(), generated=(Generated("k", (1,)),))
    questions._made.cache_clear()
    for _ in range(2):
        factory.judge(night)
    assert questions._made.cache_info().misses == night.suite.launches


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


BANNED = (5, 7)


def banning(factory, *, banned=BANNED, ignore_eos="ban", **faults):
    """Return a verified night of an engine that masks its ends where they are to be ignored."""
    night = factory.make_night({"a": factory.Speed()}, suite=factory.make_suite(("a",)))
    launches = [
        dataclasses.replace(
            one,
            can=Capabilities(ignore_eos=ignore_eos),
            info=dataclasses.replace(one.info, banned_ids=banned),
        )
        for one in night.launches
    ]
    facts = {"fake": dataclasses.replace(night.models["fake"], eos_ids=(9,))}
    night = dataclasses.replace(night, launches=tuple(launches), models=facts)
    return factory.verified(dataclasses.replace(night, verifications={}), **faults)


def test_what_an_engine_banned_is_part_of_what_is_verified(factory):
    night = banning(factory)
    asked = list(correctness.pairs(night, "fake"))
    assert {pair.banned for pair in asked} == {BANNED}  # launches' first tokens as well
    assert all(pair.key == pair_key(pair.prompt, pair.output, BANNED) for pair in asked)
    assert correctness.equality(night, CASE).right == 32
    assert not correctness.unverified_first_tokens(night, "a")


def test_a_verdict_without_the_ban_is_not_one_under_it(factory):
    """Planted: the reference was asked without the ban. Nothing is verified by that."""
    plain = factory.make_night({"a": factory.Speed()}, suite=factory.make_suite(("a",)))
    night = dataclasses.replace(banning(factory), verifications=plain.verifications)
    found = correctness.equality(night, CASE)
    assert (found.right, len(found.unverified)) == (0, 32)
    assert len(correctness.unverified_first_tokens(night, "a")) == 2


@pytest.mark.parametrize(
    ("ignore_eos", "named", "banned"),
    [("ban", (5, 7), (5, 7)), ("ban", (), (9,)), ("emit", (5, 7), ()), ("none", (5, 7), ())],
)
def test_who_bans_what(factory, ignore_eos, named, banned):
    """The engine's own word goes before the model's ends; and only where it bans any."""
    night = banning(factory, banned=named, ignore_eos=ignore_eos)
    assert {pair.banned for pair in correctness.pairs(night, "fake")} == {banned}


def test_a_kind_that_bans_needs_no_probe_to_say_so(factory):
    night = banning(factory)
    (a,) = night.suite.instances
    suite = dataclasses.replace(night.suite, instances=(dataclasses.replace(a, kind="llama_cpp"),))
    silent = tuple(dataclasses.replace(one, can=None) for one in night.launches)
    night = dataclasses.replace(night, suite=suite, launches=silent)
    assert {pair.banned for pair in correctness.pairs(night, "fake")} == {BANNED}


def test_answers_that_may_end_are_verified_without_the_ban(factory):
    night = banning(factory)
    (workload,) = night.suite.workloads
    prompts = dataclasses.replace(workload.prompts, ignore_eos=False)
    loads = (dataclasses.replace(workload, prompts=prompts),)
    runs = tuple(
        dataclasses.replace(
            run, records=tuple(dataclasses.replace(r, ignore_eos=False) for r in run.records)
        )
        for run in night.runs
    )
    suite = dataclasses.replace(night.suite, workloads=loads)
    night = dataclasses.replace(night, suite=suite, runs=runs)
    of_runs = [pair for pair in correctness.pairs(night, "fake") if len(pair.output) > 3]
    assert {pair.banned for pair in of_runs} == {()}


def judge_fake(prompt, output, banned):
    """Ask the reference of `fake` about an output, as a night does."""
    folder = ModelFolder.from_json(dict(fake.MODEL))
    asked = {"op": "verify", "id": 1, "prompt": prompt, "output": output, "epsilon": 0.0}
    line = json.dumps(asked | {"banned": banned})
    return reference.answer(reference.FakeReference(), folder, line)


def test_a_second_choice_is_right_only_under_the_ban():
    prompt = [20, 30, 40]
    first = fake.fake_tokens(prompt, 6)
    second = [*first[:3], first[3] + 1, *first[4:]]
    assert judge_fake(prompt, first, [])["num_nonargmax"] == 0
    assert judge_fake(prompt, second, [])["first_violation"] == 3
    assert judge_fake(prompt, second, [first[3]])["num_nonargmax"] == 0
    # Planted: the engine emitted what it said that it would ban.
    assert judge_fake(prompt, first, [first[3]])["first_violation"] == 3


def test_the_reference_continues_without_what_is_banned():
    folder, prompt = ModelFolder.from_json(dict(fake.MODEL)), [20, 30, 40]
    first = fake.fake_tokens(prompt, 4)
    asked = {"op": "generate", "id": 1, "prompt": prompt, "max_tokens": 4, "banned": [first[0]]}
    answer = reference.answer(reference.FakeReference(), folder, json.dumps(asked))
    assert answer["output"] == [first[0] + 1, *first[1:]]
    wrong = reference.answer(
        reference.FakeReference(), folder, json.dumps(asked | {"banned": [1000]})
    )
    assert "banned[0] must be a token id from 0 to 999" in wrong["error"]


def test_an_emitted_end_that_was_banned_is_wrong_and_named(factory):
    night = banning(factory, first_wrong=1)
    run = night.runs_of(CASE)[1]
    record = run.records[0]
    output = list(record.output_token_ids)
    output[4] = BANNED[0]
    events = tuple(
        dataclasses.replace(event, token_ids=(token,))
        for event, token in zip(record.events, output, strict=True)
    )
    spoilt = dataclasses.replace(
        run, records=(dataclasses.replace(record, events=events), *run.records[1:])
    )
    runs = tuple(spoilt if one is run else one for one in night.runs)
    # What the reference says of a masked token: further from its choice than any tolerance.
    key = pair_key(questions.requests_of(night, run)[0].prompt_token_ids, output, BANNED)
    beyond = Verification(key, 16, 3.4e38, 1, 1.0, ((4, 3.4e38, 62),))
    checked = {**night.verifications, key: beyond}
    night = dataclasses.replace(night, runs=runs, verifications=checked)
    assert verdict.judge_equality(night, CASE).verdict == "WRONG"
    assert correctness.equality(night, CASE).wrong == (
        "launch 1 request 0: token 4 ends an answer that was asked to go on: it was banned",
    )


def test_an_answer_of_which_ids_are_missing_is_not_verified(factory):
    """llama.cpp sends no id of a piece that ends within a character."""
    night = factory.make_night({"a": factory.Speed()}, suite=factory.make_suite(("a",)))
    run = night.runs_of(CASE)[1]
    short = dataclasses.replace(run.records[0], events=run.records[0].events[1:])
    short = dataclasses.replace(short, completion_tokens=len(run.records[0].events))
    fewer = dataclasses.replace(run, records=(short, *run.records[1:]))
    runs = tuple(fewer if one is run else one for one in night.runs)
    night = factory.verified(dataclasses.replace(night, runs=runs))
    found = correctness.equality(night, CASE)
    assert found.unverified == (
        "launch 1 request 0: the server did not send the ids of all tokens",
    )
    assert (found.right, found.wrong) == (31, ())
