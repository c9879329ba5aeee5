"""Prove a gate over many nights of the shipped command: `make prove` (half a minute a night).

Unchanged engines must be green; with one of them slowed, its cells must be red and no others.
`smoke` holds two fake engines against each other by limits, `fake_pairs` and `hf_pairs` by the
reference gate. Runs in a folder of its own. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADWAY = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())"]
GREEN = frozenset({"PASS", "IMPROVEMENT", "RECORDING"})
UNSURE = frozenset({"INCONCLUSIVE", "INVALID"})
SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True, slots=True)
class Proof:
    """A suite, the engines that are slowed in it, and the cells that then must be red.

    The reference gate stops as soon as one cell has told: not `all_red`, but none beside.
    """

    suite: str
    slowed: tuple[str, ...]
    levels: tuple[str, ...]
    metrics: tuple[str, ...]
    argument: str = "slower"
    all_red: bool = True

    def cells(self, instance: str | None) -> list[str]:
        """Return what must be red when an engine is slowed; nothing for none."""
        return sorted(
            f"{instance} {lv} {m}" for lv in self.levels for m in self.metrics if instance
        )


LIMITED = ("output_throughput", "decode_throughput", "ttft_p50", "tpot_p50", "e2el_p50")
PAIRED = ("output_throughput", "ttft_p50", "tpot_p50")
PROOFS = {
    "smoke": Proof("smoke", ("fake_a", "fake_b"), ("c1", "c4", "c8"), LIMITED),
    "fake_pairs": Proof(
        str(SUITES / "fake_pairs.toml"), ("new",), ("c1", "c4", "c8"), PAIRED, all_red=False
    ),
    "hf_pairs": Proof(
        str(SUITES / "hf_pairs.toml"), ("new",), ("c8",), PAIRED, "step_delay_s", all_red=False
    ),
}


def night(proof: Proof, folder: Path, seed: int, slow: str | None, by: float) -> dict[str, Any]:
    """Run one night; return what was red and whether that is as it should be."""
    words = ["run", proof.suite, "--fresh", "--set", f"suite.seed={seed}", "-q"]
    if slow is not None:
        words += ["--set", f"engine.{slow}.args.{proof.argument}={by}"]
    done = subprocess.run(
        [*HEADWAY, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"headway {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    newest = max((folder / "reports").glob("*/report.json"))
    cells = json.loads(newest.read_text())["cells"]
    said = {f"{c['instance']} {c['level']} {c['metric']}": c["verdict"] for c in cells}
    red = sorted(cell for cell, verdict in said.items() if verdict not in GREEN | UNSURE)
    expected = proof.cells(slow)
    failures = sum(
        int(suite.get("failures", 0))
        for suite in ET.parse(folder / "reports/junit.xml").iter("testsuite")
    )
    found, false = set(red) & set(expected), set(red) - set(expected)
    good = not false and bool(found) == bool(slow) and done.returncode == (1 if slow else 0)
    if proof.all_red:
        good = good and red == expected
    return {
        "seed": seed,
        "slow": slow,
        "exit": done.returncode,
        "red": len(red),
        "expected": len(expected),
        "unsure": sum(verdict in UNSURE for verdict in said.values()),
        "junit_failures": failures,
        "good": good and (failures >= 1) == bool(slow),
        "found": bool(found),
        "unexpected": sorted(set(red) ^ set(expected)),
    }


def main() -> int:
    """Return 0 when every night was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("proof", nargs="?", choices=PROOFS, default="smoke")
    parser.add_argument("--seeds", type=int, default=20, help="nights without a slowdown")
    parser.add_argument("--slow-seeds", type=int, default=2, help="nights with one, per engine")
    parser.add_argument(
        "--by", type=float, default=0.1, help="how much slower: a share, or seconds"
    )
    given = parser.parse_args()
    proof = PROOFS[given.proof]
    plan = [(seed, None) for seed in range(1, given.seeds + 1)]
    plan += [(seed, slow) for seed in range(1, given.slow_seeds + 1) for slow in proof.slowed]
    rows = []
    sys.stdout.write("seed  slowed  exit  red  expected  unsure  junit  as it should be\n")
    with tempfile.TemporaryDirectory() as folder:
        for seed, slow in plan:
            row = night(proof, Path(folder), seed, slow, given.by)
            rows.append(row)
            sys.stdout.write(
                f"{seed:4}  {slow or '-':6}  {row['exit']:4}  {row['red']:3}  {row['expected']:8}  "
                f"{row['unsure']:6}  {row['junit_failures']:5}  "
                f"{'yes' if row['good'] else row['unexpected']}\n"
            )
            sys.stdout.flush()
    sys.stdout.write(json.dumps(summary(given.proof, given.by, rows)) + "\n")
    return 0 if all(row["good"] for row in rows) else 1


def summary(proof: str, by: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the nights come to."""
    quiet, slowed = ([r for r in rows if (r["slow"] is None) == same] for same in (True, False))
    return {
        "proof": proof,
        "slowed_by": by,
        "nights": len(rows),
        "good": sum(row["good"] for row in rows),
        "false_alarms": sum(row["red"] > 0 for row in quiet),
        "unsure_nights": sum(row["unsure"] > 0 for row in quiet),
        "slowed_nights": len(slowed),
        "found": sum(row["found"] for row in slowed),
        "missed": sum(not row["good"] for row in slowed),
    }


if __name__ == "__main__":
    sys.exit(main())
