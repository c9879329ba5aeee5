"""What each pass computes: who is admitted, whose prompt goes on, who decodes, who has to wait.

First come, first served. Where the cache is full, whoever came last gives its blocks up and is
computed again later (preemption by recompute).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headway.engines.paged.batch import RowPlan
from headway.engines.paged.blocks import BlockManager
from headway.engines.paged.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's share of a pass: its ids [start, start + count)."""

    sequence: Sequence
    start: int
    count: int

    @property
    def ends(self) -> bool:
        """Whether its next token is to be chosen."""
        return self.start + self.count == len(self.sequence.ids)

    @property
    def decodes(self) -> bool:
        """Whether it is one token whose successor is asked for."""
        return self.count == 1 and self.ends

    def row(self) -> RowPlan:
        """Return what a pass has to know of it."""
        ids = self.sequence.ids[self.start : self.start + self.count]
        return RowPlan(ids, self.start, self.sequence.block_table, self.ends)


@dataclass(frozen=True, slots=True)
class Policy:
    """How many sequences at a time, and how many tokens a pass; see `options.Rung`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk: int | None = None
    mixed: bool = False


@dataclass(slots=True)
class Seen:
    """What has happened, counted since the start."""

    preempted: int = 0
    chunked: int = 0
    mixed: int = 0
    most_rows: int = 0


class Scheduler:
    """Plans passes over sequences that wait and run; `blocks` is what they share."""

    def __init__(self, policy: Policy, blocks: BlockManager) -> None:
        self._policy = policy
        self._blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.seen = Seen()
        self._prompts_had_their_turn = False
        self._preempted_now = False

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait its turn."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        sequence.over = True
        if sequence in self.running:
            self.running.remove(sequence)
            self._blocks.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(self) -> list[Scheduled]:
        """Return the next pass, decodes first; empty where nobody can go on now."""
        self._preempted_now = False
        if self._policy.mixed:
            made = self._decodes()
            made += self._prompts(self._policy.max_num_batched_tokens - len(made))
        else:
            made = self._in_turn()
        made.sort(key=lambda one: not one.decodes)  # a prompt of one token is a decode as well
        self._count(made)
        return made

    def _in_turn(self) -> list[Scheduled]:
        """Prompts first, all of them before any decode; in chunks, every other pass is theirs."""
        most = self._policy.max_num_batched_tokens
        theirs = self._policy.chunk is None or not self._prompts_had_their_turn
        made = self._prompts(most) if theirs else []
        self._prompts_had_their_turn = bool(made)
        return made or self._decodes() or self._prompts(most)

    def _decodes(self) -> list[Scheduled]:
        made = []
        for sequence in list(self.running):
            if sequence.exhausted or sequence.remaining != 1:
                continue
            if self._preempted_now and sequence not in self.running:
                continue
            if self._make_room(sequence):
                made.append(Scheduled(sequence, sequence.num_computed, 1))
        return made

    def _make_room(self, sequence: Sequence) -> bool:
        """Have a block for the sequence's last token; False where it was itself preempted."""
        while not self._blocks.grow(sequence):
            last = next(one for one in reversed(self.running) if not one.exhausted)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._blocks.release(sequence)
        self.waiting.appendleft(sequence)
        self.seen.preempted += 1
        self._preempted_now = True

    def _prompts(self, budget: int) -> list[Scheduled]:
        """Go on with prompts that have begun, then admit others, within a budget of tokens.

        Prompts that go whole pass it by what the last one that began before lacks; one that is
        longer than all of it goes alone.
        """
        whole = self._policy.chunk is None
        budget = min(budget, self._policy.chunk or budget)
        made: list[Scheduled] = []
        begun = deque(one for one in self.running if one.remaining > 1)
        while budget > 0:
            others = whole and made and not begun and self.waiting
            if others and len(self.waiting[0].ids) > budget:
                break  # one that is longer than what is left goes in a pass of its own
            sequence = begun.popleft() if begun else self._admit()
            if sequence is None:
                break
            count = sequence.remaining if whole else min(sequence.remaining, budget)
            made.append(Scheduled(sequence, sequence.num_computed, count))
            budget -= count
        return made

    def _admit(self) -> Sequence | None:
        """Let the next that waits run, where there is a row and there are blocks for it.

        Not in a pass that took blocks from somebody: it would take them back at once, and with
        overlapping steps its last token is not known yet.
        """
        if not self.waiting or len(self.running) >= self._policy.max_num_seqs:
            return None
        if self._preempted_now:
            return None
        if not self._blocks.begin(self.waiting[0]):
            return None
        sequence = self.waiting.popleft()
        self.running.append(sequence)
        return sequence

    def _count(self, made: list[Scheduled]) -> None:
        decodes = sum(one.decodes and one.sequence.num_outputs > 0 for one in made)
        self.seen.most_rows = max(self.seen.most_rows, decodes)
        self.seen.mixed += 0 < decodes < len(made)
        self.seen.chunked += sum(not one.ends for one in made)
