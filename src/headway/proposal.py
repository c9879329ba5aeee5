"""What a night would add to the stored baselines: changes for a reviewer, nothing written.

Only what passes or waits is proposed, and of a case whose requests all succeeded with right counts
and right outputs: a wrong, failing or slower engine never becomes the standard. Who wants it to
deletes the file first, and starts anew.
"""

from __future__ import annotations

from pathlib import Path

from headway import baseline, metrics, verdict
from headway.core import Case
from headway.results import Results
from headway.verdict import Judged

Change = tuple[Path, str, str]
# What must hold of a case before any of its speeds is worth keeping.
MUST_HOLD = (verdict.EQUALITY, "success_rate", "token_accuracy")


def propose(results: Results, root: Path) -> tuple[list[Change], list[str]]:
    """Return (file, old text, new text) per case, and one line per case for people."""

    def load(case: Case) -> baseline.Baseline | None:
        return baseline.load(baseline.path_of(root, results.machine.device, case))

    judged = {
        (cell.case, cell.metric): cell for cell in verdict.judge(results, verdict.Memory(load))
    }
    changes: list[Change] = []
    lines: list[str] = []
    for case in results.suite.cases():
        if (case, verdict.EQUALITY) not in judged:
            continue
        spoilt = [judged[case, m] for m in MUST_HOLD if judged[case, m].verdict in verdict.FAILS]
        if spoilt:
            lines.append(f"{case.name}: not proposed, {spoilt[0].findings[0].message}")
            continue
        wanted = [judged[case, m] for m in results.suite.baseline.metrics if (case, m) in judged]
        cells = {c.metric: _cell(results, c) for c in wanted if _sound(c)}
        left = "".join(f"; left out: {_why(cell)}" for cell in wanted if not _sound(cell))
        if not cells:
            lines.append(f"{case.name}: not proposed{left or ', it has none of the metrics'}")
            continue
        path = baseline.path_of(root, results.machine.device, case)
        old = baseline.load(path)
        merged = baseline.merge(old, _baseline(results, case, cells))
        old_text = path.read_text(encoding="utf-8") if old is not None else ""
        text = baseline.dump(merged)
        if text != old_text:
            changes.append((path, old_text, text))
        lines.append(_line(case, old, merged) + left)
    return changes, lines


def _sound(cell: Judged) -> bool:
    """Whether a cell may be kept; of 0 there is no percentage later on."""
    return cell.verdict not in verdict.FAILS and cell.value is not None and cell.value > 0


def _why(cell: Judged) -> str:
    finding = cell.findings[0]
    return f"{cell.metric} ({finding.verdict}: {finding.reason})"


def _baseline(results: Results, case: Case, cells: dict[str, baseline.Cell]) -> baseline.Baseline:
    return baseline.Baseline(
        baseline.SCHEMA,
        verdict.identity_of(results, case),
        results.machine.environment(),
        verdict.treatment_of(results, case.instance),
        cells,
    )


def _cell(results: Results, judged: Judged) -> baseline.Cell:
    metric = metrics.ALL[judged.metric]
    samples = tuple(
        baseline.Stored(results.night, s.launch, s.value)
        for s in results.samples(judged.case, metric)
        if s.value is not None
    )
    return baseline.Cell(metric.unit, metric.direction, samples)


def _line(case: Case, old: baseline.Baseline | None, new: baseline.Baseline) -> str:
    nights = max(cell.num_nights for cell in new.cells.values())
    launches = max(len(cell.samples) for cell in new.cells.values())
    epoch = old is not None and old.environment != new.environment
    anew = ", in place of what was measured before the machine changed" if epoch else ""
    return f"{case.name}: {launches} launches over {nights} nights{anew}"
