"""The C side as ctypes sees it: structures, prototypes, and where the memory of a tensor lies.

Whatever C would read out of bounds is refused here or in the callers of this file, with
ValueError; a pointer is only taken of a tensor on the CPU whose last dimension is contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

INT, POINTER_ = c_int64, c_void_p


class Matrix(ctypes.Structure):
    """A packed weight; `kernels.cpp` has the same struct."""

    _fields_ = (("packed", POINTER_), ("bias", POINTER_), ("n", INT), ("k", INT))


class Layer(ctypes.Structure):
    """One layer of a Model."""

    _fields_ = (
        *((name, POINTER_) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("qkv", Matrix * 3),
        *((name, Matrix) for name in ("out", "gate", "up", "down")),
        ("qkv_parts", INT),
    )


class Model(ctypes.Structure):
    """What a decode step reads of a model and its cache."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, POINTER_) for name in ("embedding", "norm", "cos", "sin", "keys", "values")),
        ("head", Matrix),
        *((name, INT) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, INT) for name in ("mlp", "context", "num_blocks", "block_size")),
        ("epsilon", c_float),
        ("scale", c_float),
    )


class Rows(ctypes.Structure):
    """The rows of a decode step."""

    _fields_ = (
        ("count", INT),
        *((name, POINTER_) for name in ("ids", "positions", "slots", "tables", "lengths")),
        ("width", INT),
    )


# The entries of float_kernels and bf16_kernels, in order. p: pointer, i: whole number, f: float;
# each ends with the number of threads.
TABLE = {
    "rms_norm": "pipiiifp",
    "add_rms_norm": "pipipiifp",
    "silu_mul": "pipiiip",
    "rotate": "pipppiiipi",
    "scatter": "pipiip",
    "argmax": "piiip",
    "attention": "pipppiippiiiifp",
}
TYPES = {"p": POINTER_, "i": INT, "f": c_float}


class Library:
    """The functions of the compiled kernels."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._tables = {
            torch.float32: _table(dll, "float_kernels"),
            torch.bfloat16: _table(dll, "bf16_kernels"),
        }
        self.fast_bf16 = bool(dll.has_fast_bf16())
        self.packed_size = _prototype(dll.packed_size, [INT, INT], INT)
        self.pack_matrix = _prototype(dll.pack_matrix, [POINTER_, INT, INT, POINTER_, c_int])
        self.multiply_packed = _prototype(
            dll.multiply_packed, [POINTER(Matrix), POINTER_, INT, INT, POINTER_, INT, c_int]
        )
        self.decode_step = _prototype(
            dll.decode_step, [POINTER(Model), POINTER(Rows), c_int, POINTER_, POINTER_], c_int
        )

    def table(self, dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
        """Return the functions for a precision; KeyError where there are none."""
        return self._tables[dtype]


def _table(dll: ctypes.CDLL, name: str) -> dict[str, Callable[..., Any]]:
    addresses = (c_void_p * len(TABLE)).in_dll(dll, name)
    return {
        function: ctypes.CFUNCTYPE(None, *(TYPES[letter] for letter in letters), c_int)(address)
        for (function, letters), address in zip(TABLE.items(), addresses, strict=True)
    }


def _prototype(function: Any, arguments: list[Any], result: Any = None) -> Callable[..., Any]:
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


def rows_of(x: Tensor) -> Tensor:
    """Return x with its rows laid out as C reads them: only the first dimension may have gaps."""
    dense = x[0] if x.dim() and len(x) else x
    return x if dense.is_contiguous() else x.contiguous()


def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
    """Return the tensor; ValueError unless it is contiguous, on the CPU, and as told."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{what} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous and on the CPU")
    return tensor
