"""The engine without a model: what it computes depends on every slot that it maps.

In place of a model stands one whose cache holds the ids themselves, and whose next token is a hash
of all that a row reads through its block table. One block too few, two sequences in one slot, or a
position that is off by one, and an answer differs from that of the ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.engines.contract import Output, Submission
from headway.engines.paged import engine as paged
from headway.engines.paged.batch import Batch, Carried
from headway.engines.paged.options import RUNGS
from headway.engines.paged.scheduler import Policy

EOS, VOCABULARY = 0, 50
EMPTY = -7


def next_token(ids: Sequence[int]) -> int:
    value = 17
    for place, id in enumerate(ids):
        value = (value * 31 + (place + 1) * (id + 3)) % 1_000_003
    return value % VOCABULARY


def answer(submission: Submission) -> list[int]:
    """What the engine must say, from the ids alone."""
    ids = list(submission.prompt_token_ids)
    while len(ids) < len(submission.prompt_token_ids) + submission.max_tokens:
        ids.append(next_token(ids))
        if ids[-1] == EOS and not submission.ignore_eos:
            break
    return ids[len(submission.prompt_token_ids) :]


class ToyRunner:
    """Stands where `Runner` does; its cache is a list of ids."""

    def __init__(self, policy: Policy, num_blocks: int, block_size: int, longest: int) -> None:
        self.policy, self.num_blocks, self.block_size = policy, num_blocks, block_size
        self.max_model_len = longest
        self.device = torch.device("cpu")
        self.profile = None
        self.slots = [EMPTY] * (num_blocks * block_size)
        self.most_tokens = 0

    def run(
        self, batch: Batch, samplers: Sequence[object], carried: Carried | None = None
    ) -> torch.Tensor:
        assert len(batch.last) == len(samplers)
        if carried is not None:
            carried.fill(batch.ids)
        self.most_tokens = max(self.most_tokens, batch.num_tokens)
        ids, slots = batch.ids.tolist(), batch.slots.tolist()
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        for id, slot in zip(ids, slots, strict=True):
            self.slots[slot] = id
        chosen = []
        for row, length in enumerate(batch.lengths):
            start, stop = batch.starts[row], batch.starts[row + 1]
            assert batch.positions[start:stop].tolist() == [*range(length - stop + start, length)]
            assert (row < batch.num_decodes) <= (stop - start == 1)
            if stop - 1 in batch.last.tolist():
                chosen.append(next_token(self._read(batch.block_tables[row].tolist(), length)))
        return torch.tensor(chosen, dtype=torch.int64)

    def names(self) -> dict[str, str]:
        return {}

    def _read(self, table: list[int], length: int) -> list[int]:
        size = self.block_size
        found = [self.slots[table[k // size] * size + k % size] for k in range(length)]
        assert EMPTY not in found, "a slot is read that nobody wrote"
        return found


def build(runner: ToyRunner, **options: Any) -> paged.Paged:
    """Return an engine around a toy, past everything that wants a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "Runner", lambda *_: runner)
        patch.setattr(paged.Paged, "_describe", lambda *_: None)
        return paged.Paged(SimpleNamespace(eos_ids=(EOS,)), "float32", "cpu", **options)  # type: ignore[arg-type]


class Life(RuleBasedStateMachine):
    """Requests come, go and are aborted, between steps of an engine with a small pool."""

    @initialize(
        rung=st.sampled_from(sorted(set(RUNGS) - {"no_cache", "kv_cache"})),
        rows=st.integers(1, 5),
        size=st.sampled_from((1, 2, 3, 4)),
        num_blocks=st.integers(8, 24),
        chunk=st.integers(2, 9),
        overlap=st.booleans(),
        caching=st.booleans(),
    )
    def begin(
        self, rung: str, rows: int, size: int, num_blocks: int, chunk: int, overlap: bool,
        caching: bool,
    ) -> None:  # fmt: skip
        given = RUNGS[rung]
        longest = num_blocks * size
        if given.contiguous:
            size, num_blocks, longest, caching = 20, rows, 20, False
        budget = max(rows, chunk)
        policy = Policy(rows, budget, given.chunk and chunk, given.mixed)
        self.runner = ToyRunner(policy, num_blocks, size, longest)
        self.engine = build(self.runner, rung=rung, overlap=overlap, prefix_caching=caching)
        self.longest = longest
        self.asked: dict[int, Submission] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        salt=st.sampled_from((None, "a")),
    )
    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool, salt: str | None) -> None:
        id = len(self.asked)
        max_tokens = min(max_tokens, self.longest - len(prompt))
        if max_tokens < 1:
            return
        submission = Submission(id, tuple(prompt), max_tokens, ignore_eos, salt=salt)
        self.asked[id], self.got[id] = submission, []
        self.engine.add(submission)

    @rule(data=st.data())
    @precondition(lambda self: self.asked)
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.asked)))
        self.engine.abort(id)
        self.ended.setdefault(id, "abort")

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work():
                self.take(self.engine.step())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.id not in self.ended, "a token after the end"
            self.got[output.id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.id] = output.finish_reason

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            for id, tokens in self.got.items():
                assert tokens == answer(self.asked[id])[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work():
                break
            self.take(self.engine.step())
            self.engine.check_integrity()
        assert not self.engine.has_work(), "it does not come to an end"
        for id, submission in self.asked.items():
            if self.ended[id] == "abort":
                continue
            assert self.got[id] == answer(submission)
            stopped = self.got[id][-1] == EOS and not submission.ignore_eos
            assert self.ended[id] == ("stop" if stopped else "length")
        stats = self.engine.stats()
        assert stats["kv_used_blocks"] == stats["running"] == stats["waiting"] == 0
        whole = self.runner.policy.chunk is None  # a prompt longer than the budget goes alone
        assert self.runner.most_tokens <= self.runner.policy.max_num_batched_tokens or whole


Life.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestLife = Life.TestCase


def serve(engine: paged.Paged, asked: Sequence[Submission]) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {one.id: [] for one in asked}
    for submission in asked:
        engine.add(submission)
    while engine.has_work():
        for output in engine.step():
            got[output.id] += output.token_ids
        engine.check_integrity()
    return got


@pytest.mark.parametrize("overlap", [False, True])
def test_who_came_last_gives_way_and_is_computed_again(overlap: bool) -> None:
    runner = ToyRunner(Policy(4, 64, None, False), num_blocks=10, block_size=2, longest=20)
    engine = build(runner, rung="paged", overlap=overlap)
    asked = [Submission(id, (id + 1, 2, 3, 4), 14, ignore_eos=True) for id in range(4)]
    assert serve(engine, asked) == {one.id: answer(one) for one in asked}
    assert engine.stats()["preemptions_total"] > 0
    assert engine.stats()["blocks_reused_total"] > 0


def test_a_prompt_is_found_again_under_its_own_salt_only() -> None:
    runner = ToyRunner(Policy(4, 64, 8, True), num_blocks=30, block_size=4, longest=40)
    engine = build(runner, rung="graphs", prefix_caching=True)
    prompt = (9, 8, 7, 6, 5, 4, 3, 2)

    def cached(id: int, ids: tuple[int, ...], salt: str | None) -> int | None:
        engine.add(Submission(id, ids, 5, ignore_eos=True, salt=salt))
        outputs: list[Output] = []
        while engine.has_work():
            outputs += engine.step()
            engine.check_integrity()
        assert [*outputs[0].token_ids] == answer(Submission(id, ids, 1, ignore_eos=True))
        return outputs[0].cached

    assert cached(0, prompt, "a") == 0
    # All of it is there, and yet its last token has to be computed: so is the block it is in.
    assert cached(1, prompt, "a") == 4
    assert cached(2, (*prompt, 1), "a") == 8
    assert cached(3, (*prompt, 1), "b") == cached(4, prompt, None) == 0
    assert cached(5, (1, *prompt[1:]), "a") == 0  # the same second block, after another first
    assert engine.stats()["prefix_hits_total"] == 12
