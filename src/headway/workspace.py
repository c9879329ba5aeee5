"""`headway init`: the folders and first files of a repository that uses an installed Headway."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BASELINES = """Stored baselines: one JSON file per device and case.

`headway baseline propose reports/NIGHT` writes a patch; a person reviews and applies it. Tests
read these files and never write them.
"""
REPORTS = "One folder a night: journal.jsonl, report.json, report.md, logs. Not committed.\n"
IGNORE = "/reports/*\n!/reports/README.md\n"
SHIPPED = ("smoke.toml", "quick.toml", "gpu.toml")


def files() -> dict[str, str]:
    """Return the text of every file that `init` writes, by its path."""
    suites = resources.files("headway.perf_tests.suites")
    texts = {f"suites/{name}": suites.joinpath(name).read_text("utf-8") for name in SHIPPED}
    return texts | {
        "baselines/README.md": BASELINES,
        "reports/README.md": REPORTS,
        ".gitignore": IGNORE,
    }


def write_workspace(root: Path) -> list[str]:
    """Write what is not there; return one line per file."""
    lines = []
    for name, text in files().items():
        path = root / name
        if path.exists():
            lines.append(f"{name} is there already, left alone")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        lines.append(f"{name} written")
    lines.append("next:  headway plan smoke  and  headway run smoke")
    return lines
