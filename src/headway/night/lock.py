"""One night at a time on a device: an advisory lock that the kernel gives back at any end."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from headway.fingerprint import slug


class DeviceBusy(RuntimeError):
    """Another night measures on this device; the message says which."""


@contextlib.contextmanager
def device_lock(home: Path, device: str, night: str) -> Iterator[int]:
    """Hold a device for the length of the block; raises DeviceBusy at once if it is held.

    Gives the descriptor of the lock. A process that inherits it holds the device too: an engine's
    supervisor does, so that a night that was killed keeps it until its engine is gone.
    """
    folder = home / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(device)}.lock"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another night"
            raise DeviceBusy(
                f"{device} is being measured by {holder}; two nights on one device would measure "
                "each other, so wait for it or end it"
            ) from error
        file.truncate(0)
        file.write(f"night {night} (process {os.getpid()})")
        file.flush()
        yield file.fileno()
