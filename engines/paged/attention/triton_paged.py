"""Attention that reads a paged cache through its block tables, in Triton.

One program attends for the query heads of one KV head, so that its keys and values are read once.
Where rows are few, a row's context is split between programs, and what they made is combined.
Shapes alone decide what is launched, and lengths are read on the device: a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.engines.paged.batch import Batch

MAX_SPLITS = 64
INTERPRETED_PROCESSORS = 8
TILE_BYTES = 16384  # of keys, and as much of values, that a program holds at a time
DEVICE_LENGTHS = ["tables", "context_lens", "starts", "table_stride"]


@triton.jit  # type: ignore[untyped-decorator]
def _span(length: tl.tensor, tile_keys: tl.constexpr, splits: tl.constexpr) -> tl.tensor:
    """Return how many tokens of a context each of its parts has."""
    return tl.cdiv(tl.cdiv(length, tile_keys), splits) * tile_keys


@triton.jit  # type: ignore[untyped-decorator]
def _share(
    starts: tl.tensor, row: tl.tensor, length: tl.tensor, tokens: tl.constexpr,
    tile_keys: tl.constexpr, splits: tl.constexpr, decode: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return a program's share of a row: first token and count, its tile, and the keys it reads."""
    if decode:
        first = row
        count = 1
        tile = 0
        begin = tl.program_id(0) * _span(length, tile_keys, splits)
        end = tl.minimum(begin + _span(length, tile_keys, splits), length)
    else:
        first = tl.load(starts + row)
        count = tl.load(starts + row + 1) - first
        # The last tokens have the most to read: they go first.
        tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens
        begin = 0
        end = tl.where(tile < count, tl.minimum(length - count + tile + tokens, length), 0)
    return first, count, tile, begin, end


@triton.jit  # type: ignore[untyped-decorator]
def _read(
    query: tl.tensor, position: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, scale: tl.tensor, kv_head: tl.tensor, dim: tl.tensor,
    block_size: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, lines: tl.constexpr,
    tile_keys: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the weighted sum of values [lines, head_dim], its weights' sum, and their scale."""
    best = tl.full([lines], float("-inf"), tl.float32)
    total = tl.zeros([lines], tl.float32)
    made = tl.zeros([lines, head_dim], tl.float32)
    # Each line sees a key of the first tile, valid or not, so that `best` is finite from there on.
    for start in range(begin, end, tile_keys):
        place = start + tl.arange(0, tile_keys)
        inside = place < end
        block = tl.load(table + place // block_size, mask=inside, other=0)
        slot = block.to(tl.int64) * block_size + place % block_size
        offset = (slot * kv_heads + kv_head) * head_dim
        key = tl.load(keys + offset[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(values + offset[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(place[None, :] <= position[:, None], score, float("-inf"))
        top = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(weight, 1)
        made = made * shrink[:, None]
        made = tl.dot(weight.to(value.dtype), value, made, input_precision="ieee")
        best = top
    return made, tl.where(total > 0, total, 1.0), best


@triton.jit(do_not_specialize=DEVICE_LENGTHS)  # type: ignore[untyped-decorator]
def _attend(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, sums: tl.tensor,
    tables: tl.tensor, context_lens: tl.tensor, starts: tl.tensor, scale: tl.tensor,
    q_stride: tl.tensor, table_stride: tl.tensor, block_size: tl.constexpr, kv_heads: tl.constexpr,
    group: tl.constexpr, head_dim: tl.constexpr, tokens: tl.constexpr, lines: tl.constexpr,
    tile_keys: tl.constexpr, splits: tl.constexpr, decode: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with up to tokens tokens of a row, whose heads of one KV head are its lines.

    A row that decodes has one token, at its own place in q; program 0 of it has the first of splits
    parts of its context. Other rows have the tokens starts[row] to starts[row + 1].
    """
    row, kv_head = tl.program_id(1), tl.program_id(2)
    length = tl.load(context_lens + row)
    first, count, tile, begin, end = _share(starts, row, length, tokens, tile_keys, splits, decode)
    line = tl.arange(0, lines)
    dim = tl.arange(0, head_dim)
    token = tile + line // group
    head = kv_head * group + line % group
    valid = (line < tokens * group) & (token < count)
    at = (first + token).to(tl.int64)
    query = tl.load(
        q + (at * q_stride + head * head_dim)[:, None] + dim[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    made, total, best = _read(
        query, length - count + token, keys, values, tables + row * table_stride, begin, end,
        scale, kv_head, dim, block_size, kv_heads, head_dim, lines, tile_keys,
    )  # fmt: skip
    made = made / total[:, None]
    if splits > 1:
        live = valid & (begin < end)
        part = (row * kv_heads * group + head) * splits + tl.program_id(0)
        tl.store(out + part[:, None] * head_dim + dim[None, :], made, mask=live[:, None])
        tl.store(sums + part, best + tl.log2(total), mask=live)
    else:
        goal = (at * kv_heads * group + head) * head_dim
        tl.store(
            out + goal[:, None] + dim[None, :], made.to(out.dtype.element_ty), mask=valid[:, None]
        )


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    context_lens: tl.tensor,
    head_dim: tl.constexpr,
    tile_keys: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """Weigh what the parts of a context made; `sums` are binary logarithms of their weights."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(context_lens + row)
    split = tl.arange(0, splits)
    dim = tl.arange(0, head_dim)
    live = split * _span(length, tile_keys, splits) < length
    one = row * tl.num_programs(1) + head
    part = one * splits + split
    size = tl.load(sums + part, mask=live, other=float("-inf"))
    top = tl.where(length > 0, tl.max(size, 0), 0.0)
    weight = tl.exp2(size - top)
    made = tl.load(parts + part[:, None] * head_dim + dim[None, :], mask=live[:, None], other=0.0)
    made = tl.sum(made * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1.0)
    tl.store(out + one * head_dim + dim, made.to(out.dtype.element_ty))


def refusal(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Return why the kernel cannot take such a cache, or None."""
    if head_dim in (16, 32, 64, 128, 256):
        return None
    return f"triton takes a head_dim of 16, 32, 64, 128 or 256, not {head_dim}"


def make(device: torch.device) -> TritonPaged:
    """Return an attention for a device."""
    if device.type != "cuda":
        return TritonPaged(INTERPRETED_PROCESSORS)
    return TritonPaged(torch.cuda.get_device_properties(device).multi_processor_count)


def num_splits(programs: int, tiles: int, processors: int) -> int:
    """Return how many programs share a context: a power of two, so that few kernels are compiled.

    `programs` is how many there are without, `tiles` how many parts the longest context could have.
    """
    wanted = max(1, min(2 * processors // programs, tiles, MAX_SPLITS))
    return int(1 << (wanted.bit_length() - 1))


class TritonPaged:
    """Implements `Attention` on a GPU, and anywhere in Triton's interpreter.

    `processors` is how many programs keep the device busy: its multiprocessors.
    """

    name = "triton"
    capturable = True

    def __init__(self, processors: int) -> None:
        self._processors = processors
        self._batch: Batch | None = None
        self._starts = torch.empty(0)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float
    ) -> Tensor:
        """Attend with the rows that decode, then with the others."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if batch.num_decodes:
            self._decode(q, keys, values, out, batch, scale)
        if batch.num_decodes < batch.num_rows:
            self._prompts(q, keys, values, out, batch, scale)
        return out

    def _decode(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, batch: Batch, scale: float
    ) -> None:
        rows, heads, (block_size, kv_heads, size) = batch.num_decodes, q.shape[1], keys.shape[1:]
        tile, lens = _tile_keys(q), batch.context_lens
        tiles = triton.cdiv(batch.block_tables.shape[1] * block_size, tile)
        splits = num_splits(rows * kv_heads, tiles, self._processors)
        parts, sums = out, out
        if splits > 1:
            parts = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
            sums = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
        lines = max(16, triton.next_power_of_2(heads // kv_heads))
        tensors = (q, keys, values, parts, sums, batch.block_tables, lens, lens)
        _launch((splits, rows), tensors, scale, lines, splits, decode=True)
        if splits > 1:
            _combine[rows, heads](parts, sums, out, lens, size, tile, splits)

    def _prompts(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, batch: Batch, scale: float
    ) -> None:
        decodes, group = batch.num_decodes, q.shape[1] // keys.shape[2]
        if self._batch is not batch:  # its starts are sent once, not with every layer
            starts = torch.tensor(batch.starts, dtype=torch.int32, pin_memory=q.is_cuda)
            self._batch, self._starts = batch, starts.to(q.device, non_blocking=True)
        lines = 128 if q.element_size() == 2 and q.shape[2] <= 128 else 32
        lines = max(lines, triton.next_power_of_2(group))
        longest = max(b - a for a, b in pairwise(batch.starts[decodes:]))
        grid = (triton.cdiv(longest, lines // group), batch.num_rows - decodes)
        rows = (batch.block_tables[decodes:], batch.context_lens[decodes:], self._starts[decodes:])
        _launch(grid, (q, keys, values, out, out, *rows), scale, lines, 1, decode=False)


def _launch(
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    scale: float,
    lines: int,
    splits: int,
    decode: bool,
) -> None:
    """Launch `_attend` with its tensors in order."""
    q, (block_size, kv_heads, head_dim) = tensors[0], tensors[1].shape[1:]
    group = q.shape[1] // kv_heads
    _attend[*grid, kv_heads](
        *(*tensors, scale * math.log2(math.e), q.stride(0), tensors[5].stride(0)),
        *(block_size, kv_heads, group, head_dim, 1 if decode else lines // group),
        *(lines, _tile_keys(q), splits, decode),
        num_warps=8 if lines == 128 else 4,
        # A table's entries, the keys they lead to, and their use are stages of a loop: three have
        # a tile on its way, five have two.
        num_stages=5 if decode else 3,
    )


def _tile_keys(q: Tensor) -> int:
    """Return how many keys a program holds at a time."""
    fitting = TILE_BYTES // (q.shape[2] * q.element_size())
    return int(max(16, min(64, fitting)))
