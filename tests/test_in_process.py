"""bench/in_process: an engine driven through its contract gives figures that are known before."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import in_process
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import EngineInfo
from headway.engines.contract import Output, Submission
from headway.engines.models.folder import ModelFolder

FOLDER = ModelFolder("m", None, "r", 50, (0, 1, 2), (1,), 512)


class Stepper:
    """Every step takes `step_s` of a virtual clock and gives each of `rows` requests a token."""

    info = EngineInfo("stepper", "1", "m", "float32", "cpu")

    def __init__(self, rows: int, step_s: float = 0.5, lost: int = 0) -> None:
        self.rows, self.step_s, self.lost = rows, step_s, lost
        self.now_s, self.most, self.steps = 0.0, 0, 0
        self.left: dict[int, int] = {}
        self.asked: list[Submission] = []

    def add(self, submission: Submission) -> None:
        self.asked.append(submission)
        self.left[submission.id] = submission.max_tokens
        self.most = max(self.most, len(self.left))

    def abort(self, submission_id: int) -> None:
        self.left.pop(submission_id, None)

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Output]:
        self.now_s += self.step_s
        self.steps += 1
        outputs = []
        for id in list(self.left)[: self.rows]:
            self.left[id] -= 1
            done = self.left[id] <= self.lost
            reason = ("length" if not self.lost else "stop") if done else None
            outputs.append(Output(id, (7,), reason))
            if done:
                del self.left[id]
        return outputs

    def time_step(self, phase: str, batch: int, length: int) -> float:
        raise ValueError("not timed")

    def stats(self) -> dict[str, float]:
        each = {"step_s": 4.0, "weights_s": 3.0, "host_s": 1.0}
        return {f"{name}_total": self.steps * seconds for name, seconds in each.items()}


def prompts() -> Iterator[tuple[int, ...]]:
    return in_process.prompts(FOLDER, 8, seed=1)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(2, 9))
def test_a_closed_loop_gives_what_the_engine_does_in_its_window(slots, rows, tokens):
    engine = Stepper(rows)
    served = in_process.closed_loop(engine, prompts(), tokens, slots, 1e9, lambda: engine.now_s)
    together = min(rows, slots)
    assert served.tokens_per_s == pytest.approx(together / engine.step_s)
    assert served.tpot_p50_s == pytest.approx(engine.step_s)
    assert not served.cut
    assert engine.most == slots
    assert not engine.has_work()
    # It ends with the first slot that finds nothing to do any more.
    assert 3 * slots < served.ended <= 4 * slots


@given(st.integers(1, 4), st.floats(0.6, 20))
def test_a_closed_loop_ends_when_its_time_is_up(slots, limit_s):
    engine = Stepper(1)
    served = in_process.closed_loop(engine, prompts(), 10, slots, limit_s, lambda: engine.now_s)
    first_slot_dry_s = 0.5 * 10 * (3 * slots + 1)
    assert served.cut == (served.window_s < first_slot_dry_s)
    assert served.window_s < limit_s + engine.step_s
    assert served.tokens_per_s == pytest.approx(2.0)
    assert not engine.has_work()


def test_an_answer_that_ends_early_is_a_failure():
    with pytest.raises(RuntimeError, match="ended by stop"):
        in_process.closed_loop(Stepper(2, lost=3), prompts(), 8, 2, 1e9)
    with pytest.raises(RuntimeError, match="ended by stop"):
        in_process.answers(Stepper(2, lost=3), [((3, 4), 8)])


def test_answers_go_to_those_who_asked():
    found = in_process.answers(Stepper(3), [((3,) * n, n) for n in (5, 2, 9, 1)])
    assert [len(tokens) for tokens in found] == [5, 2, 9, 1]


def test_prompts_are_random_ids_that_mean_nothing():
    one, other = (list(itertools.islice(prompts(), 20)) for _ in range(2))
    assert one == other
    assert len(set(one)) == 20
    assert all(len(ids) == 8 and set(ids).isdisjoint(FOLDER.special_ids) for ids in one)
    assert {id for ids in one for id in ids} <= set(range(50))


@given(st.integers(1, 5), st.integers(3, 9))
def test_a_split_is_of_steps_that_only_decode(rows, tokens):
    engine = Stepper(rows)
    split = in_process.decode_split(engine, prompts(), tokens, rows)
    # Neither the first tokens nor the step that ends the rows.
    assert (split.rows, split.steps) == (rows, tokens - 2)
    assert split.parts == {
        "step_s": 4.0,
        "weights_s": 3.0,
        "attention_s": None,
        "rest_s": None,
        "host_s": 1.0,
    }
    assert split.shares() == {"weights": 0.75, "attention": None, "rest": None, "host": 0.25}
    assert not engine.has_work()


def test_fewer_rows_than_asked_are_no_split():
    engine = Stepper(2)
    with pytest.raises(RuntimeError, match="does not decode 3 sequences together"):
        in_process.decode_split(engine, prompts(), 6, 3)
    assert not engine.has_work()


def test_an_engine_that_says_nothing_of_its_steps_has_no_shares():
    silent = dataclasses.replace(
        in_process.Split(1, 3, 0.5, {}), parts=dict.fromkeys(("step_s", *in_process.PARTS))
    )
    assert set(silent.shares().values()) == {None}
