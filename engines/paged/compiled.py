"""A whole decode step compiled by torch, for a CPU on which our own kernels pass none.

One unit from embedding to next token: what stands between two matrix products becomes one loop, and
weights are put into the order that the processor multiplies them in. Two units are compiled, one
row and any number of them, both for block tables of any width; it takes a minute for 30 layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.nn import functional

from headway.engines.paged.attention.summed import Summed
from headway.engines.paged.batch import Batch, Cache
from headway.engines.paged.model import Decoder
from headway.engines.paged.ops import TorchOps
from headway.engines.paged.weights import Linear, Weights

# Sizes that are compiled for: what is not 1 there may be anything but 1, and two sizes that are
# alike would be taken for one.
ROWS, WIDTH = 3, 5
Unit = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class CompiledDecode:
    """Implements decode steps of a model on a CPU.

    Raises RuntimeError where there is no C++ compiler, or where it cannot compile this.
    """

    name = "compiled"

    def __init__(self, weights: Weights, cache: Cache) -> None:
        self._ops, self.attention = FrozenOps(), Summed()
        self._decoder = Decoder(weights, self._ops, self.attention)
        # One layer's part is one tensor to the compiler only if it has a storage of its own; what
        # were views of one cache would be copied, all of it, at each step.
        self._layers = [(torch.from_dlpack(k), torch.from_dlpack(v)) for k, v in cache.layers()]
        # Isolated: else all engines of a process share the few units that one function may have.
        self._unit: Unit = torch.compile(self._step, fullgraph=True, isolate_recompiles=True)
        with config.patch(freezing=True):
            for rows in (1, ROWS):
                self._unit(*_example(rows, cache.pad_slot))

    def __call__(self, batch: Batch, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pass a batch of decoding rows; `ids` [rows] replaces its own.

        Returns the next tokens [rows] and the hidden states [rows, hidden_size], normed.
        """
        tables = batch.block_tables
        if tables.shape[1] == 1:
            tables = functional.pad(tables, (0, 1))
        given = batch.ids if ids is None else ids
        return self._unit(given, batch.positions, batch.slots, tables, batch.context_lens)

    def _step(
        self, ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, context_lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch = Batch(
            ids=ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            context_lens=context_lens,
            starts=(),
            last=torch.arange(len(ids)),
            num_decodes=0,
            lengths=(),
        )
        hidden = self._decoder.hidden(batch, self._layers)
        return self._ops.argmax(self._decoder.logits(hidden)), hidden


def _example(rows: int, pad_slot: int) -> tuple[Tensor, ...]:
    """Return a step's inputs that stand for all sizes, or for one row and tables of any width."""
    example = (
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows,), pad_slot),
        torch.zeros(rows, WIDTH, dtype=torch.int32),
        torch.ones(rows, dtype=torch.int32),
    )
    torch._dynamo.mark_dynamic(example[3], 1)
    if rows > 1:
        for one in example:
            torch._dynamo.mark_dynamic(one, 0)
    return example


class FrozenOps(TorchOps):
    """`TorchOps` whose weights the compiler takes for constants, as it does those of modules."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Keep the weight as a module's."""
        linear = nn.Linear(*weight.T.shape, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        packed: Linear = linear
        return packed
