"""Makes report.json's one value out of a night and its verdicts, and reads it again.

Holds no prompt, no output, no request: only counts, verdicts and one sample per launch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from headway import codec, fingerprint, metrics, verdict
from headway.metrics import Metric
from headway.report import case_view, private, shape
from headway.results import Results, Sample, gated
from headway.verdict import Finding, Judged
from headway.verdict.causes import Cause, causes
from headway.verdict.movement import seen_pairs, used_pairs

DECIDED = frozenset(("WRONG", "REGRESSION", "LIMIT", "IMPROVEMENT", "PASS"))


class ReportError(ValueError):
    """What is wrong with a report.json, in one sentence."""


def document(
    results: Results,
    cells: Sequence[Judged],
    *,
    strict: bool = False,
    headway_version: str,
    hide: private.Private | None = None,
) -> dict[str, Any]:
    """Return report.json as JSON values: one entry per judged cell and per case.

    `strict` goes into the exit code only. `hide` names what besides secrets must not appear; by
    default this machine's home and host name.
    """
    hide = hide or private.here()
    measured = list(dict.fromkeys(cell.case for cell in cells))
    made = shape.Document(
        format=shape.FORMAT,
        schema=shape.SCHEMA,
        night=results.night,
        started_at=results.started_at,
        finished=results.finished,
        headway=shape.Tool(headway_version, results.commit),
        suite=_suite(results, hide),
        machine=results.machine,
        models=tuple(shape.ModelView(n, m.revision) for n, m in results.models.items()),
        instances=tuple(_instance(results, i.name, hide) for i in results.suite.instances),
        summary=summary(cells, strict),
        causes=tuple(_cause(cause, hide) for cause in causes(cells)),
        cases=tuple(case_view.view(results, case, hide) for case in measured),
        cells=tuple(_cell(results, cell, hide) for cell in cells),
    )
    encoded: dict[str, Any] = codec.encode(made)
    return encoded


def read_document(text: str, where: str) -> dict[str, Any]:
    """Return the report in `text`; raises ReportError, which begins with `where`."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip())
        reason = "ends too early: it is empty or was cut off" if cut else f"is not JSON: {error}"
        raise ReportError(f"{where} {reason}") from error
    except codec.DecodeError as error:
        raise ReportError(f"{where} {error}") from error
    if not isinstance(data, dict) or data.get("format") != shape.FORMAT:
        raise ReportError(f"{where} is not a report of Headway; give it a report.json")
    if data.get("schema") != shape.SCHEMA:
        raise ReportError(
            f"{where} has schema {data.get('schema')!r}; this Headway reads {shape.SCHEMA}: "
            "use the version of Headway that wrote it, or judge the night again"
        )
    parse(data, where)
    return data


def parse(data: Mapping[str, Any], where: str = "the report") -> shape.Document:
    """Return a report's JSON values as a Document; raises ReportError for what does not fit."""
    try:
        parsed: shape.Document = codec.decode(shape.Document, data, "report")
    except codec.DecodeError as error:
        raise ReportError(f"{where} does not fit the schema of a report: {error}") from error
    return parsed


def _refuse_constant(name: str) -> Any:
    raise codec.DecodeError(f"holds {name}, which is no JSON number: something was undefined")


def summary(cells: Sequence[Judged], strict: bool) -> shape.Summary:
    """Count the cells by verdict, worst first; see `shape.Summary` for the other counts."""
    counted = Counter(cell.verdict for cell in cells)
    words = Counter(cell.word for cell in cells)
    verdicts: dict[str, int] = {v: counted[v] for v in verdict.ORDER if counted[v]}
    return shape.Summary(
        cells=len(cells),
        verdicts=verdicts,
        words={word: words[word] for word in verdict.ALL_WORDS if words[word]},
        compared=sum(any(_decided(f) for f in cell.findings) for cell in cells),
        recording=sum(any(f.verdict == "RECORDING" for f in cell.findings) for cell in cells),
        missing=counted["MISSING"],
        strict=strict,
        exit_code=verdict.exit_code([(cell.verdict, cell.due) for cell in cells], strict),
    )


def _decided(finding: Finding) -> bool:
    compares = finding.gate in ("correctness", "limit", "baseline", "reference")
    return compares and finding.verdict in DECIDED


def _suite(results: Results, hide: private.Private) -> shape.SuiteView:
    suite = results.suite
    return shape.SuiteView(
        name=suite.name,
        description=hide.text(suite.description),
        launches=suite.launches,
        seed=suite.seed,
        gates=gated(suite),
        tolerance=suite.baseline.tolerance,
        resolution=suite.baseline.resolution,
        limits=suite.limits,
        reference=None if suite.reference is None else suite.reference.instance,
        left_out={name: hide.text(why) for name, why in suite.left_out.items()},
    )


def _instance(results: Results, name: str, hide: private.Private) -> shape.InstanceView:
    asked = results.suite.instance(name)
    infos = [r.info for r in results.launches if r.instance == name and r.info is not None]
    tried = verdict.treatment_of(results, name)
    launches = tuple(
        shape.LaunchView(
            record.launch,
            record.attempt,
            record.launch_s,
            record.failure_kind,
            None if record.failure is None else hide.text(record.failure),
            record.cpus,
            record.gpus,
        )
        for record in results.launches
        if record.instance == name
    )
    shown = fingerprint.Treatment(
        tried.kind,
        hide.text(tried.version),
        hide.value(tried.args),
        hide.value(tried.env),
        hide.value(tried.settings),
        hide.value(tried.versions),
        tried.commit,
    )
    mine = [record for record in results.launches if record.instance == name]
    found = next((record.can for record in reversed(mine) if record.can is not None), None)
    if found is not None:
        found = replace(found, fields=hide.value(found.fields))
    return shape.InstanceView(
        name=name,
        model=asked.model_name,
        dtype=asked.dtype,
        device=infos[-1].device if infos else None,
        treatment=shown,
        launches=launches,
        capabilities=found,
        notices=hide.texts(tuple(dict.fromkeys(n for record in mine for n in record.notices))),
    )


def _cell(results: Results, cell: Judged, hide: private.Private) -> shape.CellView:
    unit, direction, definition, samples = _declared(results, cell)
    worst = cell.findings[0]
    return shape.CellView(
        instance=cell.case.instance,
        model=cell.case.model,
        workload=cell.case.workload,
        level=cell.case.level,
        metric=cell.metric,
        unit=unit,
        direction=direction,
        definition=definition,
        verdict=cell.verdict,
        word=cell.word,
        due=cell.due,
        message=hide.text(worst.message),
        value=cell.value,
        samples=tuple(
            shape.SampleView(
                s.launch, s.value, None if s.reason is None else hide.text(s.reason), not s.invalid
            )
            for s in samples
        ),
        findings=tuple(_finding(results, finding, hide) for finding in cell.findings),
    )


def _cause(cause: Cause, hide: private.Private) -> shape.CauseView:
    return shape.CauseView(
        verdict=cause.verdict,
        word=verdict.WORDS[cause.verdict],
        instance=cause.instance,
        headline=hide.text(cause.headline),
        cells=cause.cells,
        explanation=hide.texts(cause.explanation),
    )


def _finding(results: Results, finding: Finding, hide: private.Private) -> shape.FindingView:
    return shape.FindingView(
        gate=finding.gate,
        verdict=finding.verdict,
        reason=hide.text(finding.reason),
        worse_by=finding.worse_by,
        bound=finding.bound,
        visible=finding.visible,
        interval=finding.interval,
        pairs=_pairs(results, finding, hide) if finding.gate == "reference" else None,
        changed=hide.texts(finding.changed),
        explanation=hide.texts(finding.explanation),
    )


def _pairs(results: Results, finding: Finding, hide: private.Private) -> shape.PairsView:
    seen = seen_pairs(results, finding.case, finding.metric)
    return shape.PairsView(
        len(used_pairs(seen)), hide.texts(seen.lost[finding.case, finding.metric])
    )


Declared = tuple[str | None, Literal["higher", "lower"] | None, str, Sequence[Sample]]


def _declared(results: Results, cell: Judged) -> Declared:
    """Return unit, direction, definition and samples of a cell."""
    if cell.metric in metrics.ALL:
        metric = metrics.ALL[cell.metric]
        samples: Sequence[Sample] = results.samples(cell.case, metric)
        definition = metric.definition
        if metric.slo_only:
            slo = codec.encode(results.suite.level(cell.case).slo)
            limits = ", ".join(f"{k} <= {v:g}" for k, v in slo.items() if v is not None)
            definition += f"; SLO: {limits}"
        return metric.unit, metric.direction, definition, samples
    for step, step_samples in results.step_cells(cell.case.instance).items():
        if step.name == cell.metric:
            return step.unit, step.direction, step.definition, step_samples
    return None, None, "each output token is the reference's choice, within its tolerance", ()


def metric_named(cell: shape.CellView, unit: str) -> Metric:
    """Return a metric to judge a report's cell by, as the report declares it but for the unit."""
    assert cell.direction is not None
    return Metric(cell.metric, unit, cell.direction, cell.definition, lambda _: None)
