"""Where suites are found, and what a session writes beside its journal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import headway.perf_tests


def suite_folders() -> list[Path]:
    """Return the folders that may hold a suite: one's own first, then those that Headway ships."""
    shipped = Path(next(iter(headway.perf_tests.__path__))) / "suites"
    return [Path("suites"), Path("perf_tests/suites"), shipped]


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
