"""Blocks of the KV cache: who holds which, and which still hold what a later prompt begins with.

Each block is in exactly one of three states: free; used, by one sequence or, full and shared, by
several; or cached: used by nobody, and found again by what it holds until it is needed otherwise.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from headway.engines.paged.sequence import Sequence


class BlockManager:
    """Gives blocks of `block_size` tokens to sequences as they grow."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_reused = 0
        self.num_queried = self.num_hit = 0  # tokens of all that began, and found in blocks
        self._caching = prefix_caching
        self._free = list(range(num_blocks))  # a heap: the lowest first, so they stay together
        self._users = [0] * num_blocks
        self._ever_used = bytearray(num_blocks)
        self._cached: OrderedDict[int, bytes] = OrderedDict()  # least recently freed first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that a sequence could get now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and a prompt may find."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def begin(self, sequence: Sequence) -> bool:
        """Give a sequence all blocks its known tokens need, those it finds cached first.

        False, and nothing given, where there are too few.
        """
        found = self._find(sequence)
        fresh = self.blocks_for(len(sequence.ids)) - len(found)
        taken_from_cache = sum(block in self._cached for block in found)
        if fresh > self.num_available - taken_from_cache:
            return False
        for block in found:
            self._cached.pop(block, None)
            self._users[block] += 1
        sequence.block_table = [*found, *(self._take() for _ in range(fresh))]
        sequence.num_computed = len(found) * self.block_size
        if not sequence.num_outputs:
            # One that was preempted finds its own blocks again: that says nothing of its prompt.
            sequence.num_cached = sequence.num_computed
            self.num_queried += len(sequence.ids)
            self.num_hit += sequence.num_computed
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Give a sequence the block that its last token needs; False where none is left."""
        missing = self.blocks_for(len(sequence.ids)) - len(sequence.block_table)
        if missing > self.num_available:
            return False
        sequence.block_table += [self._take() for _ in range(missing)]
        return True

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; those that are full and known stay to be found."""
        # The end of a prompt is of less use than its beginning, so it is freed before it.
        for block in reversed(sequence.block_table):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._cached[block] = self._key_of[block]
            else:
                heapq.heappush(self._free, block)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.keys = []

    def remember(self, sequence: Sequence) -> None:
        """Let later prompts find the blocks that a sequence has filled with tokens it has read."""
        if not self._caching:
            return
        full = min(sequence.num_computed, sequence.num_read) // self.block_size
        self._name(sequence, full)
        for block, key in zip(sequence.block_table[:full], sequence.keys, strict=False):
            if block not in self._key_of and key not in self._block_of:
                self._key_of[block], self._block_of[key] = key, block

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError where blocks are lost, held twice, or too few."""
        users: Counter[int] = Counter()
        for sequence in sequences:
            assert len(set(sequence.block_table)) == len(sequence.block_table), "a block twice"
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed, "no slot"
            users.update(sequence.block_table)
        assert [users[block] for block in range(self.num_blocks)] == self._users, "users miscounted"
        for block, count in users.items():
            assert count == 1 or block in self._key_of, f"block {block} is shared and not full"
        held = [*self._free, *users, *self._cached]
        assert sorted(held) == list(range(self.num_blocks)), "free + used + cached is not all"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "keys"
        assert all(self._key_of[block] == key for block, key in self._cached.items()), "cached"

    def _find(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks a sequence begins with; its last token is always computed."""
        if not self._caching:
            return []
        self._name(sequence, (len(sequence.ids) - 1) // self.block_size)
        found = []
        for key in sequence.keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _name(self, sequence: Sequence, count: int) -> None:
        """Name a sequence's first blocks by their tokens, all before them, and its salt."""
        size = self.block_size
        while len(sequence.keys) < count:
            place = len(sequence.keys)
            before = sequence.keys[-1] if sequence.keys else repr(sequence.submission.salt).encode()
            ids = sequence.ids[place * size : (place + 1) * size]
            text = before + b"".join(id.to_bytes(4, "little") for id in ids)
            sequence.keys.append(blake2b(text, digest_size=16).digest())

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)
        else:
            block, key = self._cached.popitem(last=False)
            del self._key_of[block], self._block_of[key]
        self._users[block] = 1
        self.num_reused += self._ever_used[block]
        self._ever_used[block] = 1
        return block
