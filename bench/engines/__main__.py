"""`python bench/engines [--engines A,B] [--levels 1,8] [--launches N] …`: what each rung is worth.

A night of the suite `ladder` by `headway run`, read back as ratios. Progress goes to stderr; stdout
gets tables, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run by its path, Python puts this folder first in sys.path; its modules are `engines.…`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from arguments import names, numbers, positive  # noqa: E402

from engines import goals, table, work  # noqa: E402
from engines.rows import rows  # noqa: E402
from headway.fingerprint import find_device  # noqa: E402
from headway.results import Results  # noqa: E402

RUNGS = ("continuous", "paged", "chunked", "fused32", "flash32", "graphs")
ENGINES = ("hf_naive", "hf_static", *RUNGS, "graphs_torch", "vllm", "vllm_32")
EAGER = "vllm_eager"
WORKLOADS = ("w128_64", "mixture")
LEVELS, GPU_LEVELS = (1, 8, 32), (1, 8, 32, 128)
GPU_SCALE = 1.0
FOLDER = Path("reports") / "bench_engines"
OURS = Path(__file__).resolve().parents[2] / "engines" / "paged"


def main(argv: Sequence[str]) -> int:
    """Return 0, 2 with one clear message on stderr, or 3 if SIGINT ended it before the end."""
    given = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        options = _options(given)
        if given.night is None:
            say, beside = sys.stderr.write, work.Beside()
            before = {} if given.no_beside else work.rates(options, say)
            folder = work.measure(options)
            if not given.no_beside:
                beside = work.look_beside(folder, options, before, say)
        else:
            folder, beside = given.night, work.read_beside(given.night)
        results = work.read(folder)
    except (work.BenchError, OSError, ValueError) as error:
        sys.stderr.write(f"engines: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("engines: interrupted; the same command carries the night on\n")
        return 3
    asked = options.engines if given.night is None or given.engines else ()
    found = rows(results, beside.machine, asked)
    device = "cuda" if results.machine.gpu_driver else "cpu"
    reached = goals.goals(found, device, goals.engine_lines(OURS))
    sys.stdout.write(table.render(found, beside.profile, reached))
    done: dict[str, Any] = {"benchmark": "engines", "night": str(folder), "rows": found}
    done["goals"] = [dataclasses.asdict(goal) | {"met": goal.met} for goal in reached]
    done |= {"beside": dataclasses.asdict(beside), "engines": _engines(results)}
    done |= {"machine": dataclasses.asdict(results.machine), "launches": results.suite.launches}
    done |= {"finished": results.finished, "seconds": round(time.monotonic() - started, 1)}
    sys.stdout.write(json.dumps(done, allow_nan=False, default=str) + "\n")
    return 0


def _options(given: argparse.Namespace) -> work.Options:
    gpu = given.night is None and find_device(given.device) == "cuda"
    engines = given.engines or ENGINES
    if given.both_vllm and EAGER not in engines:
        engines = (*engines, EAGER)
    return work.Options(
        suite=given.suite,
        folder=given.folder,
        engines=tuple(engines),
        workloads=given.workloads,
        levels=given.levels or (GPU_LEVELS if gpu else LEVELS),
        launches=given.launches,
        device=given.device,
        model=given.model,
        dtype=given.dtype,
        scale=given.scale or (GPU_SCALE if gpu else None),
        verify=not given.unverified,
        naive_everywhere=given.naive_everywhere,
        sets=tuple(given.set),
    )


def _engines(results: Results) -> dict[str, Any]:
    """Return who answered: the kind, version and settings that each engine said it runs with."""
    found: dict[str, Any] = {}
    for one in results.suite.instances:
        infos = [r.info for r in results.launches if r.instance == one.name and r.info is not None]
        if infos:
            kept = ("kind", "version", "dtype", "settings", "versions")
            found[one.name] = {name: getattr(infos[-1], name) for name in kept}
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python bench/engines", description=__doc__)
    add = parser.add_argument
    add("--engines", type=names, metavar="A,B", help=f"of the suite (default: {','.join(ENGINES)})")
    add("--levels", type=numbers, metavar="1,8", help="in flight (default: 1,8,32; GPU: and 128)")
    add("--workloads", type=names, default=WORKLOADS, metavar="A,B", help="(default: both)")
    add("--launches", type=positive, default=3, help="of each engine (default: 3)")
    add("--both-vllm", action="store_true", help="vLLM not compiled as well: the faster counts")
    add("--model", help="instead of the suite's, such as synthetic:qwen2.5_1.5b (not for vLLM)")
    add("--dtype", help="instead of the suite's")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--scale", type=float, help="of the mixture's lengths (default: the suite's; GPU: 1)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as of headway run")
    add("--suite", default="ladder", help="a suite by name or path (default: ladder)")
    add("--folder", type=Path, default=FOLDER, help=f"of the nights (default: {FOLDER})")
    add("--night", type=Path, metavar="DIR", help="read this night again; nothing is measured")
    add("--unverified", action="store_true", help="outputs are not verified: half the time or so")
    add("--naive-everywhere", action="store_true", help="hf_naive beyond 8 in flight as well")
    add("--no-beside", action="store_true", help="no bandwidth, and not where a step's time goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
