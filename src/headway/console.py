"""How a command ends: its exit status, one clear sentence on stderr, and a reader that left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

GOOD, BAD, USAGE, CANNOT_TELL = 0, 1, 2, 3


class UsageFailure(Exception):
    """What the user asked for cannot be done; the message is one sentence."""


def ended(command: Callable[[], int], *refusals: type[Exception]) -> int:
    """Run a command and return its exit status; `refusals` end it as UsageFailure does."""
    expected: tuple[type[Exception], ...] = (UsageFailure, *refusals)
    try:
        return command()
    except expected as error:
        sys.stderr.write(f"headway: {error}\n")
        return USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
