"""Types of arguments that the benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return a whole number above 0; raises ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def names(text: str) -> tuple[str, ...]:
    """Return names that commas part, each once; raises ArgumentTypeError."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Return whole numbers above 0 that commas part, in order; raises ArgumentTypeError."""
    return tuple(sorted({positive(name) for name in names(text)}))
