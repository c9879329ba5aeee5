"""Prove the gate of the suite `smoke` over many seeds: `make prove` (about half a minute a seed).

Unchanged engines must be green; with one of them slowed by a tenth, its cells must be red and no
others. Runs the shipped command in a folder of its own. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

GATED = {"output_throughput", "decode_throughput", "ttft_p50", "tpot_p50", "e2el_p50"}
HEADWAY = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())"]


def night(folder: Path, seed: int, slow: str | None) -> dict[str, object]:
    """Run one night; return what was red and whether that is as it should be."""
    words = ["run", "smoke", "--fresh", "--set", f"suite.seed={seed}", "-q"]
    if slow is not None:
        words += ["--set", f"engine.{slow}.args.slower=0.1"]
    done = subprocess.run(
        [*HEADWAY, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    newest = max((folder / "reports").glob("*/report.json"))
    cells = json.loads(newest.read_text())["cells"]
    red = sorted(
        f"{c['instance']} {c['level']} {c['metric']}"
        for c in cells
        if c["verdict"] not in ("PASS", "IMPROVEMENT", "RECORDING")
    )
    expected = sorted(
        f"{slow} {level} {metric}" for level in ("c1", "c4", "c8") for metric in GATED if slow
    )
    failures = sum(
        int(suite.get("failures", 0))
        for suite in ET.parse(folder / "reports/junit.xml").iter("testsuite")
    )
    good = red == expected and done.returncode == (1 if slow else 0)
    return {
        "seed": seed,
        "slow": slow,
        "exit": done.returncode,
        "red": len(red),
        "expected": len(expected),
        "junit_failures": failures,
        "good": good and (failures >= 1) == bool(slow),
        "unexpected": sorted(set(red) ^ set(expected)),
    }


def main() -> int:
    """Return 0 when every night was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--slow-seeds", type=int, default=2)
    given = parser.parse_args()
    plan = [(seed, None) for seed in range(1, given.seeds + 1)]
    plan += [
        (seed, slow) for seed in range(1, given.slow_seeds + 1) for slow in ("fake_a", "fake_b")
    ]
    rows = []
    sys.stdout.write("seed  slowed  exit  red  expected  junit  as it should be\n")
    with tempfile.TemporaryDirectory() as folder:
        for seed, slow in plan:
            row = night(Path(folder), seed, slow)
            rows.append(row)
            sys.stdout.write(
                f"{seed:4}  {slow or '-':6}  {row['exit']:4}  {row['red']:3}  {row['expected']:8}  "
                f"{row['junit_failures']:5}  {'yes' if row['good'] else row['unexpected']}\n"
            )
            sys.stdout.flush()
    good = sum(bool(row["good"]) for row in rows)
    summary = {
        "nights": len(rows),
        "good": good,
        "false_alarms": sum(not r["good"] for r in rows if r["slow"] is None),
        "missed": sum(not r["good"] for r in rows if r["slow"] is not None),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
