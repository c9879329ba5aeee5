"""A whole decode step as CUDA graphs: one for each size of batch, from embedding to next token.

A graph replays the same kernels on the same memory, so that a step costs the host one launch. A
batch is put into fixed buffers and filled up to the next size with rows that have no context: they
write to a slot that no sequence has, and what comes of them is not looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headway.engines.paged.attention import Attention
from headway.engines.paged.batch import Batch, Cache
from headway.engines.paged.model import Decoder
from headway.engines.paged.ops import Ops

INT64, INT32 = 8, 4
WARM_UPS = 2  # compile, choose and allocate what a capture must find there


def buckets(max_rows: int) -> tuple[int, ...]:
    """Return the sizes of batch that have a graph, ascending; the last is `max_rows`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_rows, 16)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class GraphedDecode:
    """Implements decode steps of a Decoder for up to `max_rows` rows of `max_width` blocks.

    The cache's `pad_slot` is no sequence's. Without `capture` each step is run rather than
    replayed, on any device and with any attention. Raises ValueError for an attention that a graph
    cannot hold.
    """

    name = "cuda graphs"

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        attention: Attention,
        cache: Cache,
        max_rows: int,
        max_width: int,
        capture: bool = True,
    ) -> None:
        if capture and not attention.capturable:
            raise ValueError(f"attention {attention.name} asks the host for lengths: no CUDA graph")
        if capture and not torch.cuda.is_available():
            raise ValueError("CUDA graphs need a GPU")
        self.attention = attention
        self._decoder, self._ops, self._layers = decoder, ops, cache.layers()
        self._device = cache.keys.device
        self._max_width, self._pad_slot = max_width, cache.pad_slot
        self._sizes = buckets(max_rows)
        embedding = decoder.weights.embedding
        # Outputs have memory of their own: a graph's is the next graph's as well.
        self._hidden = embedding.new_zeros(max_rows, embedding.shape[1])
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        size = self._num_bytes(max_rows)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._staging = torch.zeros(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._copied = torch.cuda.Event() if self._device.type == "cuda" else None
        self._targets = {size: self._inputs(self._memory, size) for size in self._sizes}
        self._sources = {size: self._inputs(self._staging, size) for size in self._sizes}
        self._replays = self._capture() if capture else {}

    def __call__(self, batch: Batch, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pass a batch that is on the host.

        Returns the next tokens [rows] and the hidden states [rows, hidden_size], normed, both on
        the device and overwritten by the next step. `ids` [rows] replaces the batch's where they
        are on the device already. Raises ValueError for a batch that does not fit.
        """
        rows, width = batch.block_tables.shape
        if batch.num_decodes < rows or rows > self._sizes[-1] or width > self._max_width:
            raise ValueError(
                f"a graphed step takes up to {self._sizes[-1]} decoding rows of up to "
                f"{self._max_width} blocks, not {batch.num_decodes} of {rows} rows of {width}"
            )
        size = self._sizes[bisect_left(self._sizes, rows)]
        staged, source = self._sources[size]
        self._fill(source, batch)
        memory, target = self._targets[size]
        memory.copy_(staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if ids is not None:
            target.ids[:rows].copy_(ids)
        if size in self._replays:
            self._replays[size]()
        else:
            lengths = (*batch.lengths, *[0] * (size - rows))
            self._step(replace(target, lengths=lengths))
        return self._tokens[:rows], self._hidden[:rows]

    def _fill(self, source: Batch, batch: Batch) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the step before may not have read the buffer yet
        rows, width = batch.block_tables.shape
        pairs = (
            (source.ids, batch.ids, 0),
            (source.positions, batch.positions, 0),
            (source.slots, batch.slots, self._pad_slot),
            (source.context_lens, batch.context_lens, 0),
            (source.block_tables[:, :width], batch.block_tables, 0),
        )
        for buffer, given, padding in pairs:
            buffer[:rows].copy_(given)
            buffer[rows:].fill_(padding)

    def _step(self, batch: Batch) -> None:
        rows = batch.num_rows
        with torch.no_grad():
            hidden = self._decoder.hidden(batch, self._layers)
            self._hidden[:rows].copy_(hidden)
            self._tokens[:rows].copy_(self._ops.argmax(self._decoder.logits(hidden)))

    def _num_bytes(self, rows: int) -> int:
        return rows * (3 * INT64 + INT32 + self._max_width * INT32)

    def _inputs(self, memory: Tensor, rows: int) -> tuple[Tensor, Batch]:
        """Return the part of a memory that holds a batch of so many rows, and its views of it."""
        flat = memory[: self._num_bytes(rows)]
        longs, ints = flat.split((rows * 3 * INT64, rows * (1 + self._max_width) * INT32))
        ids, positions, slots = longs.view(torch.int64).view(3, rows)
        context_lens, tables = ints.view(torch.int32).split((rows, rows * self._max_width))
        batch = Batch(
            ids=ids,
            positions=positions,
            slots=slots,
            block_tables=tables.view(rows, self._max_width),
            context_lens=context_lens,
            starts=tuple(range(rows + 1)),
            last=torch.arange(rows, device=memory.device),
            num_decodes=rows,
            lengths=(0,) * rows,
        )
        return flat, batch

    def _capture(self) -> dict[int, Callable[[], None]]:
        """Capture the largest size first: the others then find their memory in its pool."""
        replays: dict[int, Callable[[], None]] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for size in reversed(self._sizes):
            (memory, batch), graph = self._targets[size], torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                memory.zero_()
                batch.slots.fill_(self._pad_slot)
                for _ in range(WARM_UPS):
                    self._step(batch)
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._step(batch)
            replays[size] = graph.replay
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return replays
