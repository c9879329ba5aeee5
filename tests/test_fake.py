"""The fake engine keeps its plan exactly, on a clock that does not wait."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.contract import Departure, Submission
from headway.engines.fake import FakeBackend, FakePlan, FakeTokenizer, fake_tokens, script
from headway.engines.virtual_time import run_virtual

# Multiples of 1/64 add and multiply without rounding, so that any order of the same sum is equal.
exact = st.integers(0, 128).map(lambda n: n / 64)
ids = st.lists(st.integers(0, 999), min_size=1, max_size=12)


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


asked = st.builds(Asked, exact, ids.map(tuple), st.integers(1, 9))
plans = st.builds(
    FakePlan,
    ttft_s=exact,
    prefill_s_per_token=exact,
    itl_s=exact,
    slots=st.integers(1, 4),
    tokens_per_chunk=st.integers(1, 4),
    slower=st.sampled_from([0.0, 0.125, 0.5, -0.25]),
)


def serve(plan: FakePlan, requests: Sequence[Asked]) -> tuple[list[list[Departure]], FakeBackend]:
    """Send requests at their times and return what left for each."""

    async def run() -> tuple[list[list[Departure]], FakeBackend]:
        loop = asyncio.get_running_loop()
        backend = FakeBackend(plan, clock=loop.time)
        await backend.start()
        started = loop.time()
        left: list[list[Departure]] = [[] for _ in requests]
        for id, request in enumerate(requests):
            await asyncio.sleep(started + request.at_s - loop.time())
            submission = Submission(id, request.prompt, request.max_tokens)
            backend.submit(submission, left[id].append)
        await asyncio.sleep(100_000)
        return left, backend

    return run_virtual(run())


def closed_form(plan: FakePlan, requests: Sequence[Asked]) -> list[list[float]]:
    """When each chunk leaves, computed from the definition alone."""
    free = [0.0] * plan.slots
    times = []
    for request in requests:
        start = max(request.at_s, heapq.heappop(free))
        tokens = [
            start
            + (1 + plan.slower)
            * (plan.ttft_s + len(request.prompt) * plan.prefill_s_per_token + k * plan.itl_s)
            for k in range(request.max_tokens)
        ]
        heapq.heappush(free, tokens[-1])
        size = plan.tokens_per_chunk
        times.append([tokens[min(k + size, len(tokens)) - 1] for k in range(0, len(tokens), size)])
    return times


@given(plans, st.lists(asked, min_size=1, max_size=8))
def test_departures_are_the_closed_form_exactly(plan: FakePlan, requests: list[Asked]) -> None:
    requests.sort(key=lambda one: one.at_s)
    left, backend = serve(plan, requests)
    assert [[one.at_s for one in each] for each in left] == closed_form(plan, requests)
    assert [one["departed_s"] for one in backend.truth()["requests"]] == closed_form(plan, requests)
    for each, request in zip(left, requests, strict=True):
        tokens = [token for one in each for token in one.output.token_ids]
        assert tokens == fake_tokens(request.prompt, request.max_tokens)
        assert {one.arrived_s for one in each} == {request.at_s}
        assert [one.output.finish_reason for one in each][-1] == "length"
        assert {one.output.finish_reason for one in each[:-1]} <= {None}


def test_times_of_any_size_are_the_plans_to_the_last_bit() -> None:
    plan = FakePlan(ttft_s=0.1, prefill_s_per_token=0.003, itl_s=0.0123)
    left, _ = serve(plan, [Asked(0.7, (11, 12, 13), 40)])
    assert [one.at_s for one in left[0]] == [
        0.7 + 1.0 * ((0.1 + 3 * 0.003) + k * 0.0123) for k in range(40)
    ]


@given(plans, st.lists(asked, min_size=1, max_size=5), exact, st.integers(0, 3))
def test_jitter_is_bounded_ordered_and_a_function_of_the_seed(
    plan: FakePlan, requests: list[Asked], jitter_s: float, seed: int
) -> None:
    requests.sort(key=lambda one: one.at_s)
    jittery = replace(plan, jitter_s=jitter_s, seed=seed, slots=len(requests))
    left, _ = serve(jittery, requests)
    again, _ = serve(jittery, requests)
    assert left == again
    for each, planned in zip(
        left, closed_form(replace(jittery, jitter_s=0), requests), strict=True
    ):
        times = [one.at_s for one in each]
        assert times == sorted(times)
        late = (1 + plan.slower) * jitter_s
        assert all(due <= at <= due + late for at, due in zip(times, planned, strict=True))


def test_another_seed_jitters_otherwise() -> None:
    plan = FakePlan(jitter_s=0.01)
    one, _ = serve(plan, [Asked(0.0, (11,), 20)])
    other, _ = serve(replace(plan, seed=1), [Asked(0.0, (11,), 20)])
    assert one != other


@given(ids, st.integers(0, 60), st.integers(0, 60))
def test_more_tokens_go_on_with_the_same(prompt: list[int], n: int, more: int) -> None:
    tokens = fake_tokens(prompt, n + more)
    assert len(tokens) == n + more
    assert tokens[:n] == fake_tokens(tuple(prompt), n)
    assert all(10 <= token < 1000 for token in tokens)


@given(ids, st.data())
def test_every_prompt_token_matters(prompt: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(prompt) - 1))
    other = [*prompt[:place], (prompt[place] + 1) % 1000, *prompt[place + 1 :]]
    assert fake_tokens(prompt, 32) != fake_tokens(other, 32)
    assert fake_tokens(prompt, 32) != fake_tokens([*prompt, 0], 32)


def test_the_tokens_are_those_of_every_other_version() -> None:
    assert fake_tokens([11, 12, 13], 4) == [338, 271, 555, 874]
    assert len(set(fake_tokens([11, 12, 13], 1000))) > 500


@given(st.lists(st.integers(0, 999)))
def test_encoding_the_text_of_ids_gives_them_back(tokens: list[int]) -> None:
    tokenizer = FakeTokenizer()
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens


@given(st.text())
def test_any_text_can_be_encoded(text: str) -> None:
    assert all(0 <= id < 1000 for id in FakeTokenizer().encode(text))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"ttft": 1}, r"fake has no argument 'ttft'; it takes: ttft_s, prefill_s_per_token"),
        ({"ttft_s": "1"}, r"ttft_s must be a number, not '1'"),
        ({"ttft_s": True}, r"ttft_s must be a number, not True"),
        ({"slots": 1.5}, r"slots must be a whole number, not 1.5"),
        ({"slots": 0}, r"slots must be at least 1, not 0"),
        ({"itl_s": -0.1}, r"itl_s must be at least 0, not -0.1"),
        ({"itl_s": float("nan")}, r"itl_s must be at least 0"),
        ({"itl_s": float("inf")}, r"itl_s must be at least 0"),
        ({"slower": -1.0}, r"slower must be"),
        ({"wrong_model": 1}, r"wrong_model must be true or false, not 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(args: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FakePlan.from_args(args)


def outputs(plan: FakePlan, nth: int, max_tokens: int = 8) -> list[tuple[float, list[int]]]:
    submission = Submission(nth, (11, 12), max_tokens)
    return [(at, list(one.token_ids)) for at, one in script(plan, nth, submission, 0.0)]


def sent(plan: FakePlan, nth: int, max_tokens: int = 8) -> list[int]:
    return [token for _, tokens in outputs(plan, nth, max_tokens) for token in tokens]


RIGHT = fake_tokens((11, 12), 8)


def test_faults_hit_every_nth_request_only() -> None:
    plan = FakePlan(wrong_token_every=3)
    assert [sent(plan, nth) == RIGHT for nth in range(1, 7)] == [True, True, False] * 2


def test_a_wrong_token_is_one_at_position_three() -> None:
    wrong = sent(FakePlan(wrong_token_every=1), 1)
    assert [place for place in range(8) if wrong[place] != RIGHT[place]] == [3]
    assert all(10 <= token < 1000 for token in wrong)


def test_a_short_output_claims_its_length() -> None:
    plan = FakePlan(short_output_every=2)
    submission = Submission(1, (11, 12), 8)
    last = script(plan, 2, submission, 0.0)[-1][1]
    assert sent(plan, 2) == RIGHT[:6]
    assert last.finish_reason == "length"
    assert sent(plan, 1) == RIGHT
    assert sent(plan, 2, max_tokens=1) == RIGHT[:1]


def test_a_lie_about_usage_is_in_the_last_output() -> None:
    plan = FakePlan(lie_usage_every=2, tokens_per_chunk=3)
    submission = Submission(1, (11, 12), 8)
    assert [one.counted for _, one in script(plan, 2, submission, 0.0)] == [None, None, 10]
    assert [one.counted for _, one in script(plan, 1, submission, 0.0)] == [None] * 3


def test_a_planted_failure_is_an_error_at_the_first_tokens_time() -> None:
    plan = FakePlan(fail_every=2, ttft_s=0.5)
    [(at, output)] = script(plan, 2, Submission(1, (11,), 8), 3.0)
    assert (at, output.finish_reason, output.token_ids) == (3.5, "error", ())
    assert output.error is not None
    assert "request 2" in output.error


def test_a_request_that_stalls_sends_two_tokens_and_keeps_its_slot() -> None:
    plan = FakePlan(stall_request=1, slots=1)
    left, backend = serve(plan, [Asked(0.0, (11, 12), 8), Asked(1.0, (11, 12), 8)])
    assert [one.output.token_ids for one in left[0]] == [(RIGHT[0],), (RIGHT[1],)]
    assert left[1] == []
    assert backend.truth()["requests"][0]["finish_reason"] is None


def test_an_abort_frees_the_slot_for_the_next() -> None:
    async def run() -> list[Departure]:
        loop = asyncio.get_running_loop()
        backend = FakeBackend(FakePlan(ttft_s=1.0, itl_s=1.0, slots=1), clock=loop.time)
        left: list[Departure] = []
        for id in range(3):
            backend.submit(Submission(id, (11,), 4), left.append)
        backend.abort(1)  # waits
        await asyncio.sleep(1.5)
        assert await backend.stats() == {"running": 1, "waiting": 1}
        backend.abort(0)  # runs
        backend.abort(77)
        await asyncio.sleep(100)
        assert await backend.stats() == {"running": 0, "waiting": 0}
        reasons = [one["finish_reason"] for one in backend.truth()["requests"]]
        assert reasons == ["abort", "abort", "length"]
        return left

    left = run_virtual(run())
    assert [(one.output.id, one.at_s) for one in left] == [
        (0, 1.0),
        *((2, 1.5 + 1.0 + k) for k in range(4)),
    ]


def test_a_step_takes_the_planned_time() -> None:
    plan = FakePlan(ttft_s=0.5, prefill_s_per_token=0.25, itl_s=0.125, slower=0.5)
    backend = FakeBackend(plan)
    assert asyncio.run(backend.control("decode", 8, 100)) == 1.5 * 0.125
    assert asyncio.run(backend.control("prefill", 8, 100)) == 1.5 * 25.5


def test_loading_takes_its_time_or_dies_of_it() -> None:
    async def load(plan: FakePlan) -> float:
        await FakeBackend(plan, clock=asyncio.get_running_loop().time).start()
        return asyncio.get_running_loop().time()

    assert run_virtual(load(FakePlan(load_s=5.0))) == 5.0
    with pytest.raises(RuntimeError, match="planted death while loading"):
        run_virtual(load(FakePlan(die_while_loading=True)))
    with pytest.raises(RuntimeError, match="wait for ever"):
        run_virtual(load(FakePlan(hang_on_start=True)))


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_virtual_timers_fire_in_order_at_their_time(times: list[float]) -> None:
    async def run() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []
        for time in times:
            loop.call_at(time, lambda due=time: fired.append((due, loop.time())))
        loop.call_at(0.5, lambda: None).cancel()
        await asyncio.sleep(2e6)
        return fired

    fired = run_virtual(run())
    assert sorted(due for due, _ in fired) == sorted(times)
    # asyncio fires what is due within its clock's resolution together.
    assert all(abs(due - now) <= 1e-9 for due, now in fired)
    assert all(one[1] <= other[1] for one, other in pairwise(fired))
