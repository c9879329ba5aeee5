"""Types of arguments that the benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return a whole number above 0; raises ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
