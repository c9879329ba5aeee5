"""What server and GPUs said during the Runs, in a line of words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway import verdict
from headway.report import text
from headway.report.shape import CaseView, Document, RunView


def by_engine(document: Document) -> Iterator[str]:
    """Say for each engine what its Runs at all levels came to at most, one line each."""
    cases: dict[str, list[CaseView]] = {}
    for case in document.cases:
        cases.setdefault(case.instance, []).append(case)
    for instance, own in cases.items():
        yield from _line(instance, document, own)


def by_case(document: Document) -> Iterator[str]:
    """Say the same of each engine at each level."""
    for case in document.cases:
        if case.level:
            yield from _line(f"{case.instance} {case.workload} {case.level}", document, [case])


def _line(name: str, document: Document, cases: Sequence[CaseView]) -> Iterator[str]:
    runs = [run for case in cases for run in case.runs]
    said = [*_server(runs), *_gpu(document, cases, runs)]
    if said:
        yield f"{name}: {', '.join(said)}"


def _server(runs: Sequence[RunView]) -> Iterator[str]:
    running, waiting = _most(runs, "server_running_max"), _most(runs, "server_waiting_max")
    if running is not None:
        yield f"at most {running:.0f} running" + _and(waiting, "{:.0f} waiting")
    for figure, words in (
        ("server_kv_usage_max", "KV cache {:.1%} full"),
        ("server_kv_filled", "{:.1%} of the KV slots that are held filled"),
        ("server_preemptions", "{:.0f} preemptions a Run"),
        ("server_prefix_hit_rate", "prefix hits {:.1%}"),
        ("server_spec_acceptance", "{:.0%} of drafted tokens accepted"),
    ):
        yield from _said(_most(runs, figure), words)


def _gpu(document: Document, cases: Sequence[CaseView], runs: Sequence[RunView]) -> Iterator[str]:
    yield from _said(_most(runs, "gpu_power_w"), "GPU {:.0f} W")
    keys = {case.key for case in cases}
    energies = [
        cell.value
        for cell in document.cells
        if cell.metric == "energy_per_token" and cell.case_key in keys and cell.value is not None
    ]
    if energies:
        least, most = min(energies), max(energies)
        span = "" if least == most else f"{least:.3g} to "
        yield f"{span}{verdict.shown(most, 'J/token')}"
    memory = _most(runs, "gpu_memory_peak_bytes")
    if memory is not None:
        yield f"{memory / 2**30:.1f} GiB of GPU memory"
    yield from _said(_most(runs, "gpu_sw_power_cap_s"), "at its power cap for {:.0f} s")


def _most(runs: Sequence[RunView], figure: str) -> float | None:
    return max((run.engine[figure] for run in runs if figure in run.engine), default=None)


def _said(value: float | None, words: str) -> Iterator[str]:
    if value is not None:
        yield words.format(value)


def _and(value: float | None, words: str) -> str:
    return "" if value is None else f" and {words.format(value)}"


def cores(document: Document) -> str | None:
    """Say which cores the engines were kept to; None where none was launched."""
    launches = [launch for engine in document.instances for launch in engine.launches]
    if not launches:
        return None
    kept = {launch.cpus for launch in launches if launch.launch_s is not None}
    if not any(kept):
        return f"client and engines shared {text.count(document.machine.num_cpus, 'core')}"
    shown = "; ".join(",".join(map(str, cpus)) or "all" for cpus in sorted(kept))
    return f"engines on {shown}, the client on others"
