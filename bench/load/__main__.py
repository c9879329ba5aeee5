"""`python bench/load [--streams N …] [--rounds N] [--seconds S] …`: load generators, compared.

Progress goes to stderr; stdout gets tables, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Run by its path, Python puts this folder first in sys.path; its modules are `load.…`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from arguments import positive  # noqa: E402

from headway.fingerprint import read_machine  # noqa: E402
from headway.installer import EnvironmentFailed  # noqa: E402
from load import environments, goals, memory, processes, table, work  # noqa: E402
from load.clients import CLIENTS  # noqa: E402

STREAMS = (64, 256, 512, 1024)
# Beside a socket for each stream, what a client or the server has open otherwise.
OTHER_FILES = 200


def main(argv: Sequence[str]) -> int:
    """Return 0, 2 with one clear message on stderr, or 3 if SIGINT ended it before the end."""
    given = _parser().parse_args(argv)
    packages = [CLIENTS[name].package for name in given.clients]
    try:
        if given.install:
            environments.install(filter(None, packages), sys.stderr.write)
        cores = _cores()
        _allow_files(max(given.streams) + OTHER_FILES)
    except (EnvironmentFailed, OSError, ValueError) as error:
        sys.stderr.write(f"load: {error}\n")
        return 2
    started = time.monotonic()
    todo = work.jobs(given.clients, given.streams, given.rounds, given.seed)
    options = work.Options(given.seconds, given.limit, given.seed, *cores)
    with processes.pinned(options.server_core):  # what this process does is not in a client's way
        results = work.run(todo, options, sys.stderr.write)
    closed = work.rows(results, given.clients, given.streams)
    opened = work.rows(results, [name for name in given.clients if CLIENTS[name].lags], [None])
    reached = goals.goals(closed, opened, _event_bytes(given.clients, results, options))
    sys.stdout.write(table.render(closed, opened) + table.render_goals(reached))
    done = {"benchmark": "load", "rows": closed, "open_loop": opened, "rounds": given.rounds}
    done["goals"] = [dataclasses.asdict(goal) | {"met": goal.met} for goal in reached]
    done |= {"options": work.describe(options), "machine": dataclasses.asdict(read_machine("cpu"))}
    done |= {"interrupted": results.interrupted, "seconds": round(time.monotonic() - started, 1)}
    sys.stdout.write(json.dumps(done, allow_nan=False) + "\n")
    return 3 if results.interrupted else 0


def _event_bytes(
    clients: Sequence[str], results: work.Results, options: work.Options
) -> float | None:
    """Return what our client holds per token event, measured after all runs."""
    if goals.OURS not in clients or results.interrupted:
        return None
    with tempfile.TemporaryDirectory(prefix="bench-load-") as name:
        held = memory.held(Path(name), streams=64, requests=256, core=options.server_core)
    return held.overhead_per_event_bytes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python bench/load", description=__doc__)
    parser.add_argument(
        "--clients",
        nargs="+",
        choices=CLIENTS,
        default=tuple(CLIENTS),
        metavar="NAME",
        help=f"some of: {', '.join(CLIENTS)} (default: all)",
    )
    parser.add_argument("--streams", nargs="+", type=positive, default=STREAMS, metavar="N")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long one run sends")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a run ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--install", action="store_true", help="first make an environment for each peer"
    )
    return parser


def _cores() -> tuple[int, int]:
    """Return the server's core and the client's; raises ValueError where there are no two."""
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("processes can be held to a core on Linux only")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise ValueError("the server and the client need a core each, and there is one only")
    return allowed[0], allowed[-1]


def _allow_files(needed: int) -> None:
    """Raise this process's limit of open files, which the clients inherit; raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        if hard != unlimited and hard < needed:
            raise OSError(f"{needed} open files are needed, and this machine allows {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
