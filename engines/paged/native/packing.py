"""Weights in the order in which the kernels read them, on pages of 2 MiB."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.engines.paged.memory import zeros
from headway.engines.paged.native.library import Library, Matrix, check

CHUNK = 1 << 25  # elements, 64 MiB


@dataclass(eq=False, slots=True)
class Packed:
    """A packed weight and what it points to."""

    matrix: Matrix
    memory: Tensor
    source: Tensor
    bias: Tensor | None


@dataclass(eq=False, slots=True)
class Packer:
    """Packs each weight once, many to a chunk of memory."""

    library: Library
    _packed: dict[tuple[int, int, int], Packed] = field(default_factory=dict)
    _chunk: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bfloat16))

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """Return a bf16 weight [n, k], k even, packed; the same one for the same memory."""
        n, k = weight.shape
        key = (weight.data_ptr(), n, k)
        if key not in self._packed:
            check(weight, torch.bfloat16, (n, k), "a weight")
            if k % 2:
                raise ValueError(f"a packed weight has an even number of columns, not {k}")
            if bias is not None:
                check(bias, torch.bfloat16, (n,), "a bias")
            memory = self._take(self.library.packed_size(n, k))
            self.library.pack_matrix(
                weight.data_ptr(), n, k, memory.data_ptr(), torch.get_num_threads()
            )
            pointer = None if bias is None else bias.data_ptr()
            matrix = Matrix(memory.data_ptr(), pointer, n, k)
            self._packed[key] = Packed(matrix, memory, weight, bias)
        return self._packed[key]

    def _take(self, count: int) -> Tensor:
        if count > len(self._chunk):
            self._chunk = zeros((max(count, CHUNK),), torch.bfloat16)
        taken, self._chunk = self._chunk[:count], self._chunk[count:]
        return taken
