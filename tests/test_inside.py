"""A closed loop inside the engine: as many in flight as there are slots, in order, all noted."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.contract import Output, Submission
from headway.engines.fake import FakeBackend, FakePlan
from headway.engines.host.inside import Replay, Schedule
from headway.engines.virtual_time import run_virtual

# Multiples of 1/64 add without rounding, so that the closed form is met exactly.
exact = st.integers(0, 128).map(lambda n: n / 64)
plans = st.builds(
    FakePlan,
    ttft_s=exact.map(lambda s: s + 1 / 64),
    itl_s=exact,
    prefill_s_per_token=exact,
    tokens_per_chunk=st.integers(1, 3),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=9))
    submissions = tuple(
        Submission(n, tuple(range(11, 11 + prompt)), output)
        for n, (prompt, output) in enumerate(sizes, 1)
    )
    return Schedule(submissions, tuple(draw(st.lists(exact, min_size=1, max_size=4))))


def on_fake(plan: FakePlan, schedule: Schedule) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        backend = FakeBackend(plan, clock=asyncio.get_running_loop().time)
        await asyncio.sleep(3.0)
        return await backend.replay(schedule)

    return run_virtual(run())


@given(plans, schedules())
def test_an_engine_that_delivers_is_kept_exactly_as_busy_as_asked(
    plan: FakePlan, schedule: Schedule
) -> None:
    found = on_fake(plan, schedule)
    assert found["start_s"] == 3.0
    free = [3.0 + at_s for at_s in schedule.slots_s]
    heapq.heapify(free)
    for one, life in zip(schedule.submissions, found["requests"], strict=True):
        due_s = heapq.heappop(free)
        first_s = plan.ttft_s + len(one.prompt_token_ids) * plan.prefill_s_per_token
        times = [due_s + first_s + k * plan.itl_s for k in range(one.max_tokens)]
        heapq.heappush(free, times[-1])
        size = plan.tokens_per_chunk
        ends = [*range(size, one.max_tokens, size), one.max_tokens]
        starts = [0, *ends[:-1]]
        wanted = [(times[b - 1], b - a) for a, b in zip(starts, ends, strict=True)]
        assert life["due_s"] == life["arrived_s"] == due_s
        assert life["departed"] == wanted
        assert (life["ended_s"], life["finish_reason"]) == (times[-1], "length")


class Stepping:
    """A toy step loop on a clock of its own: each step takes a second, a token for everyone."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.now_s = 0.0
        self.open: dict[int, int] = {}
        self.most = 0
        self.refused = refused

    def serve(self, schedule: Schedule) -> dict[str, Any]:
        replay = Replay(schedule, self.now_s)
        self._fill(replay)
        while not replay.done:
            if not self.open:
                assert replay.next_s is not None
                assert replay.next_s > self.now_s
                self.now_s = replay.next_s
            else:
                self.now_s += 1.0
                for id in list(self.open):
                    self.open[id] -= 1
                    last = not self.open[id]
                    replay.left(Output(id, (7,), "length" if last else None), self.now_s)
                    if last:
                        del self.open[id]
            self._fill(replay)
        assert replay.next_s is None
        return replay.answer()

    def _fill(self, replay: Replay) -> None:
        for one in replay.due(lambda: self.now_s):
            if one.id in self.refused:
                replay.left(Output(one.id, (), "error", "not to my taste"), self.now_s)
            else:
                self.open[one.id] = one.max_tokens
        self.most = max(self.most, len(self.open))
        assert set(self.open) == replay.in_flight


@given(schedules())
def test_a_step_loop_is_kept_as_busy_as_asked(schedule: Schedule) -> None:
    engine = Stepping()
    found = engine.serve(schedule)["requests"]
    assert engine.most <= len(schedule.slots_s)
    assert [sum(n for _, n in life["departed"]) for life in found] == [
        one.max_tokens for one in schedule.submissions
    ]
    arrivals = [life["arrived_s"] for life in found]
    assert arrivals == sorted(arrivals)
    begins = sorted(schedule.slots_s)
    ends = [life["ended_s"] for life in found]
    for life in found:
        assert life["due_s"] in begins or life["due_s"] in ends
        assert 0 <= life["arrived_s"] - life["due_s"] < 1.0  # at the next step's border


def test_what_the_engine_refuses_is_noted_and_frees_its_slot() -> None:
    asked = Schedule(tuple(Submission(n, (11,), 2) for n in (1, 2, 3)), (0.0,))
    lives = Stepping(refused=(2,)).serve(asked)["requests"]
    assert [life["error"] for life in lives] == [None, "not to my taste", None]
    assert [life["ended_s"] for life in lives] == [2.0, 2.0, 4.0]


def test_what_leaves_for_nobody_is_ignored() -> None:
    replay = Replay(Schedule((Submission(1, (11,), 1),), (0.0,)), 0.0)
    replay.left(Output(5, (1,), "length"), 1.0)
    assert not replay.done
    (one,) = replay.due(lambda: 1.0)
    replay.left(Output(one.id, (1,), "length"), 2.0)
    replay.left(Output(one.id, (1,), "length"), 3.0)
    assert replay.done
    assert [life["departed"] for life in replay.answer()["requests"]] == [[(2.0, 1)]]


def test_a_replay_that_is_cancelled_leaves_the_engine_idle() -> None:
    async def run() -> float:
        backend = FakeBackend(FakePlan(), clock=asyncio.get_running_loop().time)
        asked = Schedule(tuple(Submission(n, (11,), 100) for n in range(4)), (0.0, 0.0))
        task = asyncio.create_task(backend.replay(asked))
        await asyncio.sleep(0.5)
        assert (await backend.stats())["running"] == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await backend.stats())["running"]

    assert run_virtual(run()) == 0
