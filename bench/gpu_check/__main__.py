"""`python bench/gpu_check [--device cuda] …`: our engine on a bare machine with torch.

The Python that runs it needs torch and transformers, and nothing of ours installed; no network.
Progress goes to stderr; stdout gets tables, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Run by its path, Python puts this folder first in sys.path; its modules are `gpu_check.…`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from arguments import names, numbers  # noqa: E402

from gpu_check import gathered, table  # noqa: E402

BENCH = Path(__file__).resolve().parent.parent
BOOT = BENCH.parent / "engines" / "boot.py"
RUNGS = ("continuous", "paged", "chunked", "fused32", "flash32", "graphs")
# The one that goals are of comes first, then what it is divided by.
ENGINES = ("graphs", "hf_naive", "flash32", "continuous")
MODELS = ("synthetic:qwen2.5_1.5b", "synthetic:qwen2.5_7b")
LEVELS, NAIVE_MOST = (1, 8, 32, 128), 8
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
RATES_LIMIT_S = 120.0
# How much longer than its time a worker may take before it is ended: a cell that it is in.
GRACE_S = 20.0
FACTS = """
import json, sys
import torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
json.dump({"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}, sys.stdout)
"""


def main(argv: Sequence[str]) -> int:
    """Return 0, 1 where tokens are wrong, 2 with one clear message on stderr."""
    given, started = _parser().parse_args(argv), time.monotonic()
    until_s = started + 60 * given.minutes
    facts = _json([given.python, "-c", FACTS], RATES_LIMIT_S)
    if facts is None:
        sys.stderr.write(f"gpu_check: {given.python} cannot import torch\n")
        return 2
    device = given.device if given.device != "auto" else ("cuda" if facts["gpu"] else "cpu")
    if device == "cuda" and not facts["gpu"]:
        sys.stderr.write("gpu_check: torch finds no GPU; --device cpu does without\n")
        return 2
    boot = [given.python, str(BOOT)]
    rates = _json([*boot, "rates", "--device", device], RATES_LIMIT_S) or {}
    said: list[dict[str, Any]] = []
    ended: dict[str, str] = {}
    for place, engine in enumerate(given.engines):
        # What others do not need of their part is this one's as well.
        left_s = until_s - time.monotonic()
        share = 1.0 if place + 1 == len(given.engines) else given.share
        asked = _asked(given, engine, device, share * left_s)
        lines, why = _worker(boot, asked, min(left_s, asked["limit_s"] + GRACE_S))
        said += lines
        ended |= {} if why is None else {engine: why}
    found = gathered.gather(said, given.models, _levels(given), rates, ended)
    found |= {"device_name": facts["gpu"] or "CPU", "torch": facts["torch"], "device": device}
    found["cuda"], found["seconds"] = facts["cuda"], round(time.monotonic() - started, 1)
    found["goals"] = gathered.goals(found["rows"], device)
    sys.stdout.write(table.render(found))
    line = json.dumps({"benchmark": "gpu_check", **found}, allow_nan=False)
    if given.json is not None:
        given.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")
    wrong = any(told.get("wrong") or told.get("error") for told in found["tokens"])
    return 1 if wrong or ended else 0


def _asked(given: argparse.Namespace, engine: str, device: str, limit_s: float) -> dict[str, Any]:
    """Return what a worker is asked for; a rung is a setting of our engine."""
    kind, args = engine, dict[str, Any]()
    if engine in RUNGS:
        kind, args = "paged", {"rung": engine}
    elif engine == "hf_static":
        args = {"max_batch": max(given.levels), "batch_wait_s": 0.0}
    return {
        "engine": engine,
        "kind": kind,
        "args": args,
        "device": device,
        "dtype": given.dtype,
        "models": list(given.models),
        "levels": _levels(given)[engine],
        "prompt_tokens": given.prompt_tokens,
        "output_tokens": given.output_tokens,
        "cell_s": given.cell_seconds,
        "limit_s": limit_s,
    }


def _levels(given: argparse.Namespace) -> dict[str, list[int]]:
    return {
        engine: [n for n in given.levels if engine != "hf_naive" or n <= NAIVE_MOST]
        for engine in given.engines
    }


def _worker(
    boot: Sequence[str], asked: Mapping[str, Any], limit_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Return what a worker said, and how it ended where it was not well."""
    if limit_s <= 0:
        return [], "no time left"
    why = None
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        command = [*boot, "gpu_check.worker", json.dumps(asked)]
        process = subprocess.Popen(command, stdout=out, env=_env())
        try:
            status = process.wait(limit_s)
            why = None if status == 0 else f"its process ended with exit status {status}"
        except subprocess.TimeoutExpired:
            why = f"its process was ended after {limit_s:.0f} s"
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        whole = [line for line in out if line.endswith("\n")]
    return [json.loads(line) for line in whole if line.startswith("{")], why


def _json(command: Sequence[str], limit_s: float) -> dict[str, Any] | None:
    """Return the last line of what a command says, as JSON; None where it fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=_env(), timeout=limit_s, check=True
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return told


def _env() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python bench/gpu_check", description=__doc__)
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--engines", type=names, default=ENGINES, metavar="A,B", help=f"of {', '.join(RUNGS)}, "
        "hf_naive, hf_static, fastest to be known first")  # fmt: skip
    add("--models", type=names, default=MODELS, metavar="A,B")
    add("--levels", type=numbers, default=LEVELS, metavar="1,8", help="requests in flight")
    add("--dtype", default="bfloat16", help="of the speeds (default: bfloat16)")
    add("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    add("--output-tokens", type=int, default=OUTPUT_TOKENS)
    add("--minutes", type=float, default=7.5, help="in all; what has no time left is skipped, said")
    add("--cell-seconds", type=float, default=15.0, help="the longest that one cell is measured")
    add("--share", type=float, default=0.4, help="of the time left that an engine may take")
    add("--python", default=sys.executable, help="the Python with torch (default: this one)")
    add("--json", type=Path, metavar="FILE", help="write the line of JSON here as well")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
