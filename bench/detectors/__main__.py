"""DETBENCH: `python bench/detectors [--nights N | --seconds S] …`, or `… record REPORTS`.

Progress goes to stderr; stdout gets tables, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run by its path, Python puts this folder first in sys.path; its modules are `detectors.…`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from arguments import positive  # noqa: E402

from detectors import real_tools, record, recordings, table, work  # noqa: E402
from detectors.injections import INJECTIONS  # noqa: E402
from detectors.noise import PRESETS  # noqa: E402
from headway.installer import EnvironmentFailed  # noqa: E402

NIGHTS = 200
MANY = 100_000


def main(argv: Sequence[str]) -> int:
    """Return 0, 2 with one clear message on stderr, or 3 if SIGINT ended it before the end."""
    if argv[:1] == ["record"]:
        return record.main(argv[1:])
    given = _parser().parse_args(argv)
    if given.install:
        try:
            real_tools.install(sys.stderr.write)
        except EnvironmentFailed as error:
            sys.stderr.write(f"detectors: {error}\n")
            return 2
    started = time.monotonic()
    nights = given.nights or (NIGHTS if given.seconds is None else MANY)
    todo = work.jobs(given.detectors, given.presets, given.injections, given.seed, nights)
    try:
        counted = work.run(todo, given.processes, given.seconds, sys.stderr.write)
    except recordings.RecordingError as error:
        sys.stderr.write(f"detectors: {error}\n")
        return 2
    rows = work.rows(counted, given.detectors, given.presets)
    sys.stdout.write(table.render(rows))
    done = {"benchmark": "detbench", "seed": given.seed, "nights": nights, "rows": rows}
    done |= {"interrupted": counted.interrupted, "seconds": round(time.monotonic() - started, 1)}
    sys.stdout.write(json.dumps(done, allow_nan=False) + "\n")
    return 3 if counted.interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python bench/detectors", description=__doc__)
    presets = (*PRESETS, *recordings.names())
    for name, known in (
        ("presets", presets),
        ("detectors", tuple(work.DETECTORS)),
        ("injections", tuple(INJECTIONS)),
    ):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=known,
            default=known,
            metavar="NAME",
            help=f"some of: {', '.join(known).replace('%', '%%')} (default: all)",
        )
    parser.add_argument(
        "--nights",
        type=positive,
        help=f"under {work.MAIN}, a quarter elsewhere (default: {NIGHTS}; no end with --seconds)",
    )
    parser.add_argument(
        "--seconds", type=float, help="begin nothing after this; the rows say how far they came"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=positive, default=os.cpu_count() or 1)
    parser.add_argument(
        "--install", action="store_true", help="first make an environment for Apache Otava"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
