"""The paged engine's hot operations in C++, for CPUs: built where there is a compiler.

`available` gives them, or says in a sentence why there are none.
"""

from __future__ import annotations

from functools import cache

from headway.engines.paged.native import build
from headway.engines.paged.native.kernels import NativeAttention, NativeOps
from headway.engines.paged.native.library import Library
from headway.engines.paged.native.step import DecodeStep

__all__ = ["DecodeStep", "Library", "NativeAttention", "NativeOps", "available"]


@cache
def available() -> tuple[Library | None, str | None]:
    """Return the loaded kernels and None, or None and the reason."""
    built = build.load()
    return (None if built.library is None else Library(built.library)), built.reason
