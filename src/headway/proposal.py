"""What a night would add to the stored baselines: changes for a reviewer, nothing written.

Only cells that may be judged are proposed: valid, complete, and of a case whose outputs were
verified. A wrong or failing engine never becomes the standard.
"""

from __future__ import annotations

from pathlib import Path

from headway import baseline, metrics, verdict
from headway.core import Case
from headway.results import Results

Change = tuple[Path, str, str]


def propose(results: Results, root: Path) -> tuple[list[Change], list[str]]:
    """Return (file, old text, new text) per case, and one line per case for people."""
    changes: list[Change] = []
    lines: list[str] = []
    for case in results.suite.cases():
        if not results.runs_of(case):
            continue
        cells = _cells(results, case)
        if not cells:
            lines.append(f"{case.name}: not proposed, {_reason(results, case)}")
            continue
        path = baseline.path_of(root, results.machine.device, case)
        new = baseline.Baseline(
            baseline.SCHEMA,
            verdict.identity_of(results, case),
            results.machine.environment(),
            verdict.treatment_of(results, case.instance),
            cells,
        )
        old = baseline.load(path)
        same = old is not None and _comparable(old, new)
        merged = baseline.merge(old if same else None, new)
        old_text = path.read_text(encoding="utf-8") if old is not None else ""
        text = baseline.dump(merged)
        if text != old_text:
            changes.append((path, old_text, text))
        lines.append(_line(case, old, merged, same))
    return changes, lines


def _comparable(old: baseline.Baseline, new: baseline.Baseline) -> bool:
    """Whether samples may be pooled: the same thing measured on the same machine."""
    return old.identity == new.identity and old.environment == new.environment


def _cells(results: Results, case: Case) -> dict[str, baseline.Cell]:
    if verdict.judge_equality(results, case).verdict != "PASS":
        return {}
    cells = {}
    for name in results.suite.baseline.metrics:
        metric = metrics.ALL[name]
        judged = verdict.judge_cell(results, case, metric, lambda _: None)
        if judged.findings[0].gate == "complete":
            continue
        samples = tuple(
            baseline.Stored(results.night, s.launch, s.value)
            for s in results.samples(case, metric)
            if s.value is not None
        )
        cells[name] = baseline.Cell(metric.unit, metric.direction, samples)
    return cells


def _reason(results: Results, case: Case) -> str:
    equality = verdict.judge_equality(results, case)
    if equality.verdict != "PASS":
        return equality.findings[0].message
    name = results.suite.baseline.metrics[0]
    return verdict.judge_cell(results, case, metrics.ALL[name], lambda _: None).findings[0].message


def _line(case: Case, old: baseline.Baseline | None, new: baseline.Baseline, same: bool) -> str:
    nights = max(cell.num_nights for cell in new.cells.values())
    launches = max(len(cell.samples) for cell in new.cells.values())
    replaced = ", replaces what was measured of another thing" if old and not same else ""
    return f"{case.name}: {launches} launches over {nights} nights{replaced}"
