"""Files that are whole or not there: written beside their place, synced, then moved into it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file of this text; see `write_lines`."""
    write_lines(path, (text,))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that readers see the old text or the new one; raises OSError.

    Folders are made. Of several writers of one file the last one wins, and none is torn.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for each writer, that no reader's `*.json` finds.
    draft = path.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
