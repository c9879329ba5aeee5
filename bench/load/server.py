"""The server whose truth is known, for the time of a run."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.mock_server import truth
from load.processes import RunFailed, last_line, supervised

MODEL = "mock"
TTFT_S = 0.1
ITL_S = 0.02
LOG = "server.jsonl"
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where it listens."""

    base_url: str


@contextlib.contextmanager
def serving(core: int, folder: Path) -> Iterator[Server]:
    """Start a fresh server on a core; raises RunFailed. After the block its log can be read."""
    command = [str(Path(sys.executable).with_name("headway")), "mock-server", "--port", "0"]
    command += ["--ttft", str(TTFT_S), "--itl", str(ITL_S), "--tokens-per-chunk", "1"]
    command += ["--dialect", "vllm", "--model", MODEL, "--log", str(folder / LOG)]
    with supervised(command, core, folder, "server", {}) as process:
        until_s = time.monotonic() + START_S
        while not (said := (folder / "server.out").read_text()).endswith("\n"):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RunFailed(
                    f"the mock server did not start: {last_line(folder / 'server.err')}"
                )
            time.sleep(0.05)
        yield Server(json.loads(said.splitlines()[0])["base_url"])


def served(folder: Path) -> Sequence[truth.Record]:
    """Return what the server's log says of every request for tokens."""
    return truth.load(folder / LOG)
