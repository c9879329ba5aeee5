"""End a container: its processes are a daemon's, and outlive the client that asked for it.

    python end_container.py CLIENT CIDFILE NAME

It is known by the id that the client wrote into its cidfile, or, where the client did not live to
write that, by the name that we gave it. What is gone already is no error. Standard library only.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

GRACE_S = 10
ANSWER_S = 14.0


def main(client: str, cidfile: str, name: str) -> None:
    """Ask the container to end, kill it after a grace period, and remove it."""
    container = name
    with contextlib.suppress(OSError):
        container = Path(cidfile).read_text(encoding="utf-8").strip() or name
    for command in (["stop", "-t", str(GRACE_S)], ["rm", "-f"]):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [client, *command, container],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=ANSWER_S,
                check=False,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
