"""Prompts are a function of workload, launch and seed, and of nothing else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import Request
from headway.engines.models.tiny_recall import task
from headway.lengths import Lognormal, Part, Trace, Uniform
from headway.prefix_cache import expected_hit_rate
from headway.workload import (
    MIN_RECALL_TOKENS,
    TINY_RECALL,
    Prefix,
    Prompts,
    Vocabulary,
    extremes,
    lengths_of,
    make_requests,
    pair_key,
    workload_hash,
)

KINDS = ("uniform", "recall")
VOCABULARY = Vocabulary(300, (0, 1, 299))


def made(n=8, launch=1, seed=1, vocabulary=VOCABULARY, **changes):
    prompts = replace(Prompts("w32_16", 32, 16), **changes)
    return make_requests(prompts, n, launch, seed, vocabulary)


def prompts_of(requests):
    return [one.prompt_token_ids for one in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_requests_are_a_prefix_of_more(kind):
    many = made(40, kind=kind)
    for n in (0, 1, 7, 40):
        assert made(n, kind=kind) == many[:n]
    assert [one.index for one in many] == list(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_is_another(kind):
    requests = [one for launch in (0, 1, 2) for one in made(50, launch, kind=kind)]
    assert len(set(prompts_of(requests))) == 150


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [{"launch": 2}, {"seed": 2}, {"name": "other"}])
def test_another_launch_seed_or_name_gives_other_prompts(kind, change):
    assert not set(prompts_of(made(kind=kind))) & set(prompts_of(made(kind=kind, **change)))


def test_launch_and_seed_are_not_added_up():
    assert not set(prompts_of(made(launch=1, seed=12))) & set(prompts_of(made(launch=11, seed=2)))
    assert not set(prompts_of(made(launch=12, seed=1))) & set(prompts_of(made(launch=2, seed=11)))


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(MIN_RECALL_TOKENS, 300),
    st.integers(100, 2000),
    st.sets(st.integers(0, 60), max_size=40),
)
def test_lengths_are_exact_and_ids_are_ordinary(kind, length, size, special):
    vocabulary = Vocabulary(size, tuple(special))
    for one in made(3, kind=kind, prompt_tokens=length, vocabulary=vocabulary):
        assert len(one.prompt_token_ids) == length
        assert all(0 <= token < size and token not in special for token in one.prompt_token_ids)
        assert one.max_tokens == 16


def test_case_22_a_prompt_of_one_token_is_one_ordinary_token():
    """Prompts are ids: there is no text that could encode to another length, nor an empty one."""
    for one in made(200, prompt_tokens=1):
        assert len(one.prompt_token_ids) == 1
        assert one.prompt_token_ids[0] not in VOCABULARY.special_ids


def test_uniform_prompts_use_every_ordinary_id_alike():
    drawn = [token for one in made(200, prompt_tokens=297) for token in one.prompt_token_ids]
    counts = [drawn.count(token) for token in VOCABULARY.ordinary_ids()]
    assert len(counts) == 297
    # 200 expected of each; the standard deviation is 14.
    assert min(counts) > 125
    assert max(counts) < 275


def test_a_vocabulary_without_ordinary_ids_is_refused():
    for vocabulary in (Vocabulary(2, (0, 1)), Vocabulary(0)):
        with pytest.raises(ValueError, match="without an ordinary one"):
            made(vocabulary=vocabulary)


def test_the_options_of_the_workload_reach_every_request():
    for one in made(output_tokens=9, ignore_eos=False):
        assert (one.max_tokens, one.ignore_eos) == (9, False)
        assert (one.temperature, one.top_p, one.seed) == (0.0, 1.0, None)


def test_tiny_recalls_vocabulary_is_the_one_its_marks_are_for():
    specials = (task.BOS, task.EOS, task.PAD, task.QUERY)
    assert Vocabulary(task.VOCAB_SIZE, specials) == TINY_RECALL
    assert task.MIN_PROMPT_TOKENS == MIN_RECALL_TOKENS


@pytest.mark.parametrize("length", [12, 13, 32, 128, 300, 480])
def test_recall_poses_exactly_the_task_that_tiny_recall_learned(length):
    requests = made(
        20, vocabulary=TINY_RECALL, kind="recall", prompt_tokens=length, launch=3, seed=5
    )
    for one in requests:
        draw = random.Random(f"workload/w32_16/5/3/{one.index}")
        prompt, _ = task.recall_prompt(draw, length)
        assert one.prompt_token_ids == tuple(prompt)


@pytest.mark.parametrize("length", [12, 32, 128, 480])
def test_a_recall_prompt_can_be_answered_from_itself(length):
    for one in made(20, vocabulary=TINY_RECALL, kind="recall", prompt_tokens=length):
        prompt = one.prompt_token_ids
        records = task.find_records(prompt)
        answer = task.expected_output(prompt, 2 * len(records))
        assert prompt[0] == task.BOS
        assert (prompt[-3], prompt[-1]) == (task.QUERY, task.THEN)
        # One cycle: the walk needs each record once and comes home.
        assert sorted(answer[::2]) == sorted(a for a, _ in records)
        assert answer[-2] == prompt[-2]
        assert len(records) >= 2


def test_recall_in_another_vocabulary_has_the_same_form():
    size = 5000
    for one in made(20, vocabulary=Vocabulary(size, (0,)), kind="recall", prompt_tokens=64):
        begin, query, then, filler = 1, 2, 3, range(4, 15)
        prompt = one.prompt_token_ids
        assert prompt[0] == begin
        assert (prompt[-3], prompt[-1]) == (query, then)
        body = [token for token in prompt[1:-3] if token not in filler]
        assert all(token > filler[-1] for token in body)
        successor = dict(zip(body[::2], body[1::2], strict=True))
        walked, symbol = set(), prompt[-2]
        while symbol not in walked:
            walked.add(symbol)
            symbol = successor[symbol]
        assert walked == set(successor)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 15])
def test_a_vocabulary_too_small_for_recall_is_refused(size):
    with pytest.raises(ValueError, match=f"more than the {size} ids"):
        made(vocabulary=Vocabulary(size), kind="recall")
    assert len(made(vocabulary=Vocabulary(16), kind="recall")) == 8


def test_a_recall_prompt_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="at least 12 tokens, not 11"):
        made(kind="recall", prompt_tokens=11)


def test_the_hash_is_the_same_in_another_process():
    program = (
        "from headway.workload import *\n"
        "vocabulary = Vocabulary(300, (0, 1, 299))\n"
        "for kind in ('uniform', 'recall'):\n"
        "    prompts = Prompts('w32_16', 32, 16, kind)\n"
        "    print(workload_hash(make_requests(prompts, 8, 1, 1, vocabulary)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [workload_hash(made(kind=kind)) for kind in KINDS]


CHANGED = {
    "index": 7,
    "prompt_token_ids": (5, 6, 8),
    "max_tokens": 17,
    "ignore_eos": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "session": 1,
    "turn": 1,
    "body": "{}",
    "endpoint": "/v1/chat/completions",
    "texts": ("x",),
}


@pytest.mark.parametrize("name", [one.name for one in fields(Request)])
def test_the_hash_is_another_when_any_part_of_a_request_is(name):
    one = Request(0, (5, 6, 7), 16)
    assert workload_hash([replace(one, **{name: CHANGED[name]})]) != workload_hash([one])


def test_the_hash_knows_order_number_and_where_a_prompt_ends():
    a, b = Request(0, (5, 6), 16), Request(1, (7,), 16)
    lists = [[a, b], [b, a], [a], [], [a, b, b], [replace(a, prompt_token_ids=(5,)), b]]
    assert len({workload_hash(each) for each in lists}) == len(lists)


def test_a_pair_is_named_by_prompt_and_output():
    names = {pair_key((1, 2), (3,)), pair_key((1,), (2, 3)), pair_key((1, 2, 3), ())}
    assert len(names) == 3
    assert pair_key([1, 2], [3]) == pair_key((1, 2), (3,))
    banned = {pair_key((1, 2), (3,), ids) for ids in ((), (4,), (4, 5))}
    assert len(banned) == 3


def test_plain_workloads_are_what_they_were_before_lengths_could_vary():
    """Another hash would make every stored baseline one of another workload."""
    assert workload_hash(made()) == "4f12543542740f90"
    assert workload_hash(made(kind="recall")) == "f27a5966839f7dcd"


TRACE = Trace("t.csv", (0.0, 0.5, 2.0), (5, 40, 17), (3, 9, 1))
VARIED = {
    "uniform": {"prompt_tokens": Uniform(20, 60), "output_tokens": Uniform(2, 9)},
    "lognormal": {"prompt_tokens": Lognormal(30.0, 0.7, 15, 90)},
    "mix": {
        "prompt_tokens": None,
        "output_tokens": None,
        "mix": (Part(20, 4), Part(Uniform(40, 50), 8, 3.0)),
    },
    "trace": {"prompt_tokens": None, "output_tokens": None, "trace": TRACE},
    "prefix": {"prefix": Prefix(24, groups=3, share=0.7)},
    "sampled": {"temperature": 0.7, "top_p": 0.9},
    "natural": {"ignore_eos": False},
}


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
def test_what_varies_is_a_function_of_its_seed_and_fewer_are_a_prefix_of_more(changes):
    many = made(30, **changes)
    assert made(30, **changes) == many
    for n in (0, 1, 13):
        assert made(n, **changes) == many[:n]
    others = [made(30, seed=2, **changes), made(30, launch=2, **changes)]
    others += [made(30, name="other", **changes)]
    assert len({workload_hash(each) for each in (many, *others)}) == 4


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
def test_requests_are_as_long_in_every_launch_and_hold_other_ids(changes):
    one, other = made(30, launch=1, **changes), made(30, launch=2, **changes)
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in one] == [
        (len(r.prompt_token_ids), r.max_tokens) for r in other
    ]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(one, other, strict=True))
    assert expected_hit_rate(one) == pytest.approx(expected_hit_rate(other), abs=0.02)


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
def test_varied_prompts_are_within_bounds_and_ordinary(changes):
    prompts = replace(Prompts("w32_16", 32, 16), **changes)
    shortest = [min(ends) for ends in zip(*extremes(prompts, 0), strict=True)]
    longest = [max(ends) for ends in zip(*extremes(prompts, 1), strict=True)]
    for one in made(60, **changes):
        assert shortest[0] <= len(one.prompt_token_ids) <= longest[0]
        assert shortest[1] <= one.max_tokens <= longest[1]
        assert not {0, 1, 299} & set(one.prompt_token_ids)
        assert all(0 <= token < 300 for token in one.prompt_token_ids)


PARAMETERS = [
    {},
    *VARIED.values(),
    {"prompt_tokens": 33},
    {"output_tokens": 17},
    {"prompt_tokens": Uniform(20, 61)},
    {"prompt_tokens": Lognormal(30.0, 0.8, 15, 90)},
    {"prompt_tokens": Lognormal(31.0, 0.7, 15, 90)},
    {**VARIED["mix"], "mix": (Part(20, 4), Part(Uniform(40, 50), 8, 1.0))},
    {**VARIED["trace"], "trace": replace(TRACE, output_tokens=(3, 9, 2))},
    {"prefix": Prefix(25, groups=3, share=0.7)},
    {"prefix": Prefix(24, groups=4, share=0.7)},
    {"prefix": Prefix(24, groups=3, share=0.2)},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7},
]


def test_each_parameter_makes_another_workload():
    hashes = [workload_hash(made(60, **changes)) for changes in PARAMETERS]
    assert len(set(hashes)) == len(hashes)


def test_a_trace_begins_again_where_it_is_too_short():
    prompts = replace(Prompts("w", None, None), trace=TRACE)
    assert lengths_of(prompts, 5, 1) == ((5, 3), (40, 9), (17, 1), (5, 3), (40, 9))
    one, again = (r.prompt_token_ids for r in made(4, **VARIED["trace"])[::3])
    assert len(one) == len(again) == 5
    assert one != again


def test_lengths_and_ids_do_not_share_their_draws():
    """A fixed length and a law that happens to give it make the same prompt."""
    law = {"prompt_tokens": Uniform(20, 60)}
    for one in made(20, **law):
        same = made(20, prompt_tokens=len(one.prompt_token_ids))[one.index]
        assert one.prompt_token_ids == same.prompt_token_ids


def test_sampled_requests_have_a_seed_each_and_greedy_ones_have_none():
    requests = [r for launch in (1, 2) for r in made(50, launch, **VARIED["sampled"])]
    assert len({one.seed for one in requests}) == 100
    assert all(0 <= one.seed < 2**31 for one in requests)
    assert all((one.temperature, one.top_p) == (0.7, 0.9) for one in requests)
    assert [one.prompt_token_ids for one in requests[:50]] == prompts_of(made(50))
    assert all(one.seed is None for one in made())


def test_prompts_of_a_group_share_its_prefix_and_no_more():
    requests = made(200, vocabulary=Vocabulary(50_000), prefix=Prefix(24, groups=3, share=0.7))
    begins = {}
    for one in requests:
        begins.setdefault(one.prompt_token_ids[:24], []).append(one)
    shared = {begin: ones for begin, ones in begins.items() if len(ones) > 1}
    assert len(shared) == 3
    with_prefix = [one for ones in shared.values() for one in ones]
    # 140 expected with one, 47 of each group; standard deviations 6.5 and 6.
    assert 114 < len(with_prefix) < 166
    assert all(23 < len(ones) < 71 for ones in shared.values())
    assert {len(one.prompt_token_ids) for one in with_prefix} == {56}
    assert {len(o.prompt_token_ids) for o in requests if o not in with_prefix} == {32}
    assert len({one.prompt_token_ids[24:] for one in with_prefix}) == len(with_prefix)


def simulated_hit_rate(requests, block_tokens):
    """Serve requests in order through a cache that remembers each prefix of whole blocks."""
    cache, hits, total = set(), 0, 0
    for one in requests:
        prompt = one.prompt_token_ids
        ends = range(block_tokens, len(prompt) + 1, block_tokens)
        for end in ends:
            if prompt[:end] not in cache:
                break
            hits += block_tokens
        cache |= {prompt[:end] for end in ends}
        total += len(prompt)
    return hits / total if total else None


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=30),
    st.integers(1, 4),
)
def test_the_expected_hit_rate_is_what_a_perfect_cache_finds(prompts, block_tokens):
    requests = [Request(k, tuple(prompt), 1) for k, prompt in enumerate(prompts)]
    found = expected_hit_rate(requests, block_tokens)
    assert found == pytest.approx(simulated_hit_rate(requests, block_tokens))


@pytest.mark.parametrize("block_tokens", [1, 16])
def test_the_hit_rate_of_a_workload_is_that_of_its_parts(block_tokens):
    prefix = Prefix(64, groups=4, share=0.5)
    requests = made(200, vocabulary=Vocabulary(50_000), prefix=prefix)
    assert expected_hit_rate(requests, block_tokens) == pytest.approx(
        simulated_hit_rate(requests, block_tokens)
    )
    num = sum(len(one.prompt_token_ids) == 96 for one in requests)
    # All but the first of each group find their prefix, whatever else two prompts share by chance.
    expected = (num - 4) * 64 / (num * 96 + (200 - num) * 32)
    assert expected_hit_rate(requests, 16) == pytest.approx(expected)


def test_the_hit_rate_of_plain_prompts_is_none_at_all_but_for_chance():
    assert expected_hit_rate(made(100, vocabulary=Vocabulary(50_000))) < 1e-3
    assert expected_hit_rate(made(2) * 2) == pytest.approx(0.5, abs=0.05)
    assert expected_hit_rate([]) is None
