"""The table of metrics: what each is called and means.

A metric without samples is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headway import stats
from headway.core import RequestRecord, Run
from headway.metrics import run as of
from headway.metrics.request import e2el_s, itl_s, protocol_s, tpot_s, ttfc_s, ttft_s, ttft_sent_s

Direction = Literal["higher", "lower"]
Samples = Callable[[Run], list[float]]
VERSION = 1


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric. Being a `percentile` of `samples` bounds what may gate on it.

    One that is `inside_only` needs a replay inside, and gates by a limit only: it lies around 0,
    where no ratio means anything. One that there is only `where_told` may lack a value unless a
    gate is set on it.
    """

    name: str
    unit: str
    direction: Direction
    definition: str
    of_run: Callable[[Run], float | None]
    percentile: float | None = None
    closed_loop_only: bool = False
    further_tokens_only: bool = False
    slo_only: bool = False
    samples: Samples | None = None
    where_told: bool = False
    inside_only: bool = False

    def worse_by(self, value: float, than: float) -> float:
        """Return how much worse `value` is, as a ratio minus one: 0.05 is 5 % worse."""
        return than / value - 1 if self.direction == "higher" else value / than - 1


def _percentile(samples: Samples, q: float) -> Callable[[Run], float | None]:
    return lambda run: stats.percentile(samples(run), q)


def _each(of: Callable[[RequestRecord], float | None]) -> Samples:
    return lambda run: [v for v in map(of, run.records) if v is not None]


def _pooled_itl(run: Run) -> list[float]:
    return [gap for record in run.records for gap in itl_s(record)]


def _latency(
    name: str, text: str, samples: Samples, qs: Sequence[int], further: bool = False
) -> list[Metric]:
    return [
        Metric(
            f"{name}_p{q}",
            "s",
            "lower",
            f"{text}; p{q}",
            _percentile(samples, q),
            q,
            further_tokens_only=further,
            samples=samples,
        )
        for q in qs
    ]


_QS = (50, 90, 99)
TABLE: dict[str, Metric] = {
    metric.name: metric
    for metric in [
        Metric(
            "output_throughput",
            "tokens/s",
            "higher",
            "output tokens in the steady window (all slots busy until the first runs dry) / length",
            of.output_throughput,
            closed_loop_only=True,
        ),
        Metric(
            "output_throughput_span",
            "tokens/s",
            "higher",
            "output tokens of completed requests / (last token event - first due)",
            of.output_throughput_span,
            closed_loop_only=True,
        ),
        Metric(
            "decode_throughput",
            "tokens/s",
            "higher",
            "tokens after each first event / union of the requests' [first, last event]",
            of.decode_throughput,
            further_tokens_only=True,
        ),
        Metric(
            "decode_throughput_span",
            "tokens/s",
            "higher",
            "output tokens but for each request's first / (last token event - first due)",
            of.decode_throughput_span,
            closed_loop_only=True,
            further_tokens_only=True,
        ),
        Metric(
            "request_throughput",
            "requests/s",
            "higher",
            "completed requests / (last completion - first due)",
            of.request_throughput,
            closed_loop_only=True,
        ),
        Metric(
            "goodput",
            "requests/s",
            "higher",
            "requests within every limit of the SLO / (last completion - first due)",
            of.goodput,
            slo_only=True,
        ),
        Metric(
            "token_goodput",
            "tokens/s",
            "higher",
            "tokens of requests within every limit of the SLO / (last completion - first due)",
            of.token_goodput,
            slo_only=True,
        ),
        Metric(
            "slo_attainment",
            "1",
            "higher",
            "requests within every limit of the SLO / requests that were due",
            of.slo_attainment,
            slo_only=True,
        ),
        Metric(
            "tokens_per_event",
            "tokens",
            "lower",
            "output tokens / token events; above 1, an ITL is between chunks",
            of.tokens_per_event,
        ),
        *_latency("ttft", "first token event - due", _each(ttft_s), _QS),
        *_latency("ttfc", "first token event but reasoning - due", _each(ttfc_s), (50,)),
        *_latency("ttft_sent", "first token event - sent", _each(ttft_sent_s), (50,)),
        *_latency(
            "tpot", "(last - first event) / tokens after the first", _each(tpot_s), _QS, True
        ),
        *_latency("itl", "gaps between token events, pooled over requests", _pooled_itl, _QS, True),
        *_latency("e2el", "last token event - due", _each(e2el_s), _QS),
        Metric(
            "protocol_cost",
            "1",
            "lower",
            "1 - output throughput / that of the same requests replayed in the engine's process",
            of.protocol_cost,
            closed_loop_only=True,
            inside_only=True,
            where_told=True,
        ),
        *(
            replace(metric, where_told=True)
            for metric in _latency(
                "protocol_s",
                "E2EL - (last token's departure from the engine - the request's arrival there)",
                _each(protocol_s),
                (50,),
            )
        ),
        Metric("success_rate", "1", "higher", "completed / due", of.success_rate),
        Metric(
            "token_accuracy", "1", "higher", "requests with right token counts", of.token_accuracy
        ),
        Metric(
            "cached_share",
            "1",
            "higher",
            "prompt tokens from the server's prefix cache / all prompt tokens, by its usage",
            of.cached_share,
            where_told=True,
        ),
        Metric(
            "peak_memory", "bytes", "lower", "peak resident memory of the engine", of.peak_memory
        ),
        Metric(
            "gpu_memory",
            "bytes",
            "lower",
            "most GPU memory in use at once - what was in use before the launch",
            of.gpu_memory,
            where_told=True,
        ),
        Metric(
            "energy_per_token",
            "J/token",
            "lower",
            "energy of the engine's GPUs during the Run / output tokens",
            of.energy_per_token,
            where_told=True,
        ),
    ]
}

# What belongs to a launch, not to a Run: measured once per launch.
LAUNCH_TIME = Metric(
    "launch_time", "s", "lower", "process start - first verified token", lambda _: None
)
ALL: dict[str, Metric] = {**TABLE, LAUNCH_TIME.name: LAUNCH_TIME}
# What is known of an engine only by whoever starts it, and sees its processes.
OF_PROCESSES = (LAUNCH_TIME.name, "peak_memory")


def step_metric(phase: str, batch: int) -> Metric:
    """Return the metric of one engine step, timed by the engine's own clock."""
    text = f"one {phase} step with {batch} sequences; the median of its rounds"
    return Metric(f"{phase}_step_b{batch}", "s", "lower", text, lambda _: None)
