"""What a report says of a case and its Runs besides its cells: counts, identity, other views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from headway import correctness, fingerprint, metrics, prefix_cache, questions, telemetry, verdict
from headway.core import Case, Run, Series
from headway.report import private, shape, vllm_view
from headway.results import Results
from headway.verdict.split import engine_split

# A reason per request would make a report as large as the journal.
MAX_REASONS = 5
MAX_POINTS = 300


def view(results: Results, case: Case, hide: private.Private) -> shape.CaseView:
    """Return a case: its identity, how many answers were right, and each of its Runs."""
    runs = [run for _, run in sorted(results.runs_of(case).items())] if case.level else []
    return shape.CaseView(
        instance=case.instance,
        model=case.model,
        workload=case.workload,
        level=case.level,
        identity=_identity(results, case),
        outputs=_outputs(results, case) if case.level else None,
        runs=tuple(_run(results, run, hide) for run in runs),
        replaced=tuple(
            shape.ReplacedView(run.launch, run.attempt, _few(hide.texts(run.invalid)))
            for run in results.replaced(case)
        ),
    )


def _identity(results: Results, case: Case) -> dict[str, str]:
    facts = results.models.get(case.model)
    if case.level and facts is not None:
        return verdict.identity_of(results, case)
    revision = facts.revision if facts is not None else "unknown"
    dtype = results.suite.instance(case.instance).dtype
    device = results.machine.device
    return fingerprint.identity(case, revision, dtype, "", device, metrics.VERSION)


def _outputs(results: Results, case: Case) -> shape.Outputs | None:
    """Count the completed answers, and those of which every token was found right.

    None where outputs are sampled, and so none is right or wrong.
    """
    if correctness.why_unverified(results, case) is not None:
        return None
    if case.model not in results.models:
        return shape.Outputs(0, 0, 0)
    found = correctness.equality(results, case)
    return shape.Outputs(found.num_requests, found.right, found.by_text)


def _run(results: Results, run: Run, hide: private.Private) -> shape.RunView:
    expected = _expected_hit_rate(results, run)
    return shape.RunView(
        launch=run.launch,
        attempt=run.attempt,
        started_at=run.started_at,
        span_s=run.span_s,
        concurrency=run.level.concurrency,
        rate_per_s=run.level.rate_per_s,
        arrivals=run.level.arrivals,
        requests=requests_of(run),
        invalid=_few(hide.texts(run.invalid)),
        client=dict(run.client),
        engine=dict(run.engine),
        engine_split=engine_split(run),
        vllm_bench_serve=vllm_view.view(run),
        fill_s=run.level.fill_s,
        expected_hit_rate=expected,
        prompt_path=run.prompt_path,
        added_prompt_tokens=_added(run),
        cached_share=metrics.cached_share(run),
        notices=tuple(_notices(run, expected)),
        series=tuple(map(_short, run.series)),
    )


def _notices(run: Run, expected_hit_rate: float | None) -> Iterator[str]:
    """Say what may matter and does not make the Run invalid."""
    engine = run.engine
    if engine.get("warmup_stable", 1.0) < 1.0:
        what = f"after {engine['warmup_requests']:.0f} requests and {engine['warmup_s']:.1f} s"
        yield f"its warm-up was not stable {what}: its first requests may be slower than the rest"
    short = prefix_cache.shortfall(metrics.cached_share(run), expected_hit_rate)
    if short is not None:
        yield short


def _short(one: Series) -> Series:
    """Return a series as a report holds it: thinned, and with six digits."""
    thin = telemetry.thinned(one, MAX_POINTS)
    at_s = tuple(round(at, 3) for at in thin.at_s)
    return replace(thin, at_s=at_s, values=tuple(float(f"{v:.6g}") for v in thin.values))


def _added(run: Run) -> shape.Span | None:
    counts = metrics.tokens_added_each(run)
    return shape.Span(min(counts), max(counts)) if counts else None


def _expected_hit_rate(results: Results, run: Run) -> float | None:
    shares = results.suite.workload(run.case.workload).prompts.prefix is not None
    if not shares or run.case.model not in results.models:
        return None
    return prefix_cache.expected_hit_rate(questions.requests_of(results, run))


def _few(reasons: tuple[str, ...]) -> tuple[str, ...]:
    rest = len(reasons) - MAX_REASONS
    return reasons if rest <= 0 else (*reasons[:MAX_REASONS], f"and {rest} more")


def requests_of(run: Run) -> shape.Requests:
    """Count a Run's requests by what became of them."""
    errors = Counter(r.error.kind for r in run.records if r.error is not None)
    completed = sum(r.completed for r in run.records)
    failed = sum(errors.values())
    return shape.Requests(
        due=len(run.records),
        completed=completed,
        failed=failed,
        in_flight=len(run.records) - completed - failed,
        errors=dict(sorted(errors.items())),
    )
