"""`headway init`: the folders and first files of a repository that uses an installed Headway.

What it writes besides lies in this folder as it will lie there: a suite, and the engine it runs.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BASELINES = """Stored baselines: one JSON file per device and case.

A night that has enough samples writes `baseline.patch` into its folder; a person reviews it and
applies it. Tests read these files and never write them.
"""
REPORTS = """One folder a night: journal.jsonl, report.json, report.md, junit.xml, logs.

Git ignores them. `headway judge reports/NIGHT` judges one again without measuring.
"""
IGNORE = "__pycache__/\n/reports/*\n!/reports/README.md\n"
SHIPPED = ("smoke.toml", "quick.toml", "gpu.toml")
NEXT = """next:  headway run smoke   two fake engines, a minute, no model
       headway run mine    the engine in my_engines/echo.py, which is yours to change
"""


def files() -> dict[str, str]:
    """Return the text of every file that `init` writes, by its path."""
    suites = resources.files("headway.perf_tests.suites")
    texts = {f"suites/{name}": suites.joinpath(name).read_text("utf-8") for name in SHIPPED}
    here = resources.files(__name__)
    texts["suites/mine.toml"] = here.joinpath("mine.toml").read_text("utf-8")
    for name in ("__init__.py", "echo.py"):
        texts[f"my_engines/{name}"] = here.joinpath("my_engines", name).read_text("utf-8")
    return texts | {
        "baselines/README.md": BASELINES,
        "reports/README.md": REPORTS,
        ".gitignore": IGNORE,
    }


def write_workspace(root: Path) -> list[str]:
    """Write what is not there; return one line per file, and what to do next."""
    lines = []
    for name, text in files().items():
        path = root / name
        if path.exists():
            lines.append(f"{name} is there already, left alone")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        lines.append(f"{name} written")
    return [*lines, *NEXT.splitlines()]
