"""Answers that are held until they are parsed: in memory, and beyond a limit in a file."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from headway.transport import Body

SPILL_BYTES = 1 << 28
# What is in a folder for temporary files is often in memory; what is here is not.
ON_DISK = Path("/var/tmp")


class _SpillFile(io.FileIO):
    """A file without a name, closed with the last body that lies in it."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(dir=ON_DISK if ON_DISK.is_dir() else None)
        super().__init__(descriptor, "r+b")
        Path(name).unlink()

    def __del__(self) -> None:
        self.close()


class Spool:
    """Keeps the bodies of requests that have ended."""

    def __init__(self, limit_bytes: int = SPILL_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._held: list[Body] = []
        self._file: io.FileIO | None = None

    def keep(self, body: Body) -> None:
        """Hold one more body, or move all that are held to the file when they are too much."""
        self._held.append(body)
        self.held_bytes += body.held_bytes
        if self.held_bytes > self.limit_bytes:
            self._file = self._file or _SpillFile()
            for one in self._held:
                one.spill(self._file)
            self._held.clear()
            self.held_bytes = 0
