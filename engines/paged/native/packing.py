"""Weights in the order in which the kernels read them, on pages of 2 MiB."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.engines.paged.native.library import Library, Matrix, check

HUGE_PAGE = 1 << 21
CHUNK = 1 << 26
ADVICE = 14  # MADV_HUGEPAGE


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for 2 MiB pages behind a large tensor; best before it is first written.

    A decode step reads every weight once: with small pages a good part of it is address lookups.
    """
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    if stop > start:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(start, stop - start, ADVICE)  # refused, it is as it was


def empty(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor on 2 MiB pages, where the system has them."""
    count = math.prod(sizes)
    spare = HUGE_PAGE // dtype.itemsize
    memory = torch.empty(count + spare, dtype=dtype)
    skip = -memory.data_ptr() % HUGE_PAGE // dtype.itemsize
    aligned = memory[skip : skip + count]
    advise_huge_pages(aligned)
    return aligned.view(sizes)


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
            self._chunk = empty((max(count, CHUNK // 2),), torch.bfloat16)
        taken, self._chunk = self._chunk[:count], self._chunk[count:]
        return taken
