"""Where suites are found, and what a session writes beside its journal."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import headway.perf_tests
from headway.outlook import Known


def suite_folders() -> list[Path]:
    """Return the folders that may hold a suite: one's own first, then those that Headway ships."""
    shipped = Path(next(iter(headway.perf_tests.__path__))) / "suites"
    return [Path("suites"), Path("perf_tests/suites"), shipped]


def earlier_nights(suite: str, reports: Path) -> Known:
    """Return what the newest report on a suite knows: its length, and what each cell could see."""
    for path in sorted(reports.glob(f"*-{suite}-*/report.json"), reverse=True):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            runs = [run for case in document["cases"] for run in case["runs"]]
            seconds = sum(run["span_s"] + run["engine"].get("inside_s", 0.0) for run in runs)
            visible = {
                ("-".join(filter(None, (c["instance"], c["workload"], c["level"]))), c["metric"]): v
                for c in document["cells"]
                for v in [f["visible"] for f in c["findings"] if f["visible"] is not None]
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a report of another schema says nothing that a plan could use
        return Known(seconds, visible)
    return Known()


def keep_junit(path: Path, folder: Path) -> None:
    """Take the host's name out of JUnit's file, and leave a copy with the night."""
    with contextlib.suppress(OSError):
        text = re.sub(r' hostname="[^"]*"', ' hostname="-"', path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
        (folder / "junit.xml").write_text(text, encoding="utf-8")


def write_reports(folder: Path, document: dict[str, Any]) -> None:
    """Write report.json and report.md; a disk that refuses them is said, and loses no journal."""
    from headway.report.markdown import markdown

    texts = {
        "report.json": json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        "report.md": markdown(document),
    }
    for name, text in texts.items():
        path = folder / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"{path} cannot be written: {error.strerror}; the journal is whole\n")
