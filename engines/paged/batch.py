"""What one forward pass computes: rows of tokens, where each stands, and where its K and V go.

A row is one sequence's share of the pass: rows that decode pass one token each and come first,
then come rows that pass a part of their prompt. Everything a kernel reads is a tensor or a whole
number here; no sequence is seen below this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of all layers, each [num_layers, num_blocks, block_size, kv_heads, head_dim].

    A slot is a place for one token: slot = block × block_size + offset.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return int(self.keys.shape[1])

    @property
    def block_size(self) -> int:
        """How many tokens a block holds."""
        return int(self.keys.shape[2])

    @property
    def pad_slot(self) -> int:
        """The last slot, for rows that only fill a batch up: its block is to be no sequence's."""
        return self.num_blocks * self.block_size - 1

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values, [num_blocks, block_size, kv_heads, head_dim]."""
        return list(zip(self.keys, self.values, strict=True))


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass over T tokens of R rows.

    ids, positions, slots: [T] int64. block_tables: [R, width] int32, each row's blocks in order,
    0 behind its last. context_lens: [R] int32, tokens that a row's last token sees, itself
    included. starts: R + 1 places in T; row r passes the tokens starts[r] to starts[r + 1].
    last: [S] int64, places in T whose next token is asked for. The first `num_decodes` rows pass
    one token each; `lengths` is context_lens on the host.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    starts: tuple[int, ...]
    last: Tensor
    num_decodes: int
    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Sequences in the pass."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in the pass."""
        return self.starts[-1]

    def to(self, device: torch.device) -> Batch:
        """Return the same with its tensors on a device; nothing waits for it."""
        names = ("ids", "positions", "slots", "block_tables", "context_lens", "last")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that a pass chose [S]: on the device for the next pass, and on their way to the host.

    The copy is asked for at once. Asked for when it is read, it would come after whatever pass has
    been launched meanwhile, and steps would not overlap.
    """

    on_device: Tensor
    on_host: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, tokens: Tensor) -> Chosen:
        """Start the copy of tokens."""
        if not tokens.is_cuda:
            return cls(tokens, tokens, None)
        on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(tokens, on_host, copied)

    def read(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.on_host.tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class Carried:
    """Tokens that the pass before chose, on the device: rows of this pass that begin with them."""

    chosen: Tensor
    rows: tuple[int, ...]
    places: tuple[int, ...]

    def fill(self, ids: Tensor) -> Tensor:
        """Put them into a pass's ids, in place; only rows that decode have one, and come first."""
        rows, places = torch.tensor([self.rows, self.places]).to(ids.device, non_blocking=True)
        return ids.index_copy_(0, rows, self.chosen[places])


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row on the host: `ids` [start, start + len(ids)) of a sequence, and its blocks.

    `ends` says that the last of them has no successor yet: the next token is asked for.
    """

    ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    ends: bool


def build(rows: Sequence[RowPlan], block_size: int) -> Batch:
    """Lay rows out for a pass, on the host; those with one token that ends must come first."""
    num_decodes = 0
    for row in rows:
        if len(row.ids) != 1 or not row.ends:
            break
        num_decodes += 1
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, last = [0], []
    for row in rows:
        ids += row.ids
        stop = row.start + len(row.ids)
        positions += range(row.start, stop)
        table = row.block_table
        slots += [
            table[p // block_size] * block_size + p % block_size for p in range(row.start, stop)
        ]
        starts.append(len(ids))
        if row.ends:
            last.append(len(ids) - 1)
    lengths = tuple(row.start + len(row.ids) for row in rows)
    width = max(-(-length // block_size) for length in lengths)
    tables = [[*row.block_table[:width], *[0] * (width - len(row.block_table))] for row in rows]
    long = torch.tensor([ids, positions, slots], dtype=torch.int64)
    return Batch(
        ids=long[0],
        positions=long[1],
        slots=long[2],
        block_tables=torch.tensor(tables, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        starts=tuple(starts),
        last=torch.tensor(last, dtype=torch.int64),
        num_decodes=num_decodes,
        lengths=lengths,
    )
