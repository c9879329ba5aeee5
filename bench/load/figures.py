"""What really happened, by the server's log; how far from it a client's own report is.

Both sides are times of one request on one clock each: a difference of two stamps of the server's,
beside a difference of two stamps of the client's. The clocks are never mixed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from headway import stats
from headway.mock_server.truth import Record, itl_s, peak_concurrency, ttft_s

# Of all writes in their order, the share at each end that is left to starting up and running dry.
EDGE = 0.1
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Reported:
    """What a client says of its own run, in seconds; None is what it does not say.

    The send lags are of open loop: how much later than planned a request left.
    """

    requests: int
    failures: int
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    send_lag_p50_s: float | None = None
    send_lag_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class Truth:
    """What the server's log says of a run.

    TTFT is first write − request parsed, whoever asked; ITL is between writes of one request,
    pooled; `itl_of_requests_p99_s` is of its mean in each request. `tokens_per_s` is of the middle
    80 % of all writes, of a token each, `tokens_per_s_span` of everything from the first request to
    the last write. Before a request is parsed, the server itself delays it: its connection waits to
    be accepted, then the request to be read and parsed.
    """

    requests: int
    tokens: int
    start_s: float
    end_s: float
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    itl_of_requests_p99_s: float | None
    tokens_per_s: float | None
    tokens_per_s_span: float | None
    peak_concurrency: int
    accept_delay_mean_s: float | None
    accept_delay_p99_s: float | None
    parse_delay_mean_s: float | None
    parse_delay_p99_s: float | None


def truth(served: Sequence[Record]) -> Truth | None:
    """Return the figures of all requests that got a token; None if none did."""
    done = [one for one in served if one.writes_s]
    if not done:
        return None
    writes_s = sorted(itertools.chain.from_iterable(one.writes_s for one in done))
    ttfts_s = [late_s for late_s in map(ttft_s, done) if late_s is not None]
    gaps_s = [itl_s(one) for one in done]
    itls_s = list(itertools.chain.from_iterable(gaps_s))
    means_s = [statistics.fmean(gaps) for gaps in gaps_s if gaps]
    accept_s, parse_s = delays_s(done)
    tokens = sum(map(sum, (one.tokens for one in done)))
    start_s = min(one.parsed_s for one in done)
    return Truth(
        requests=len(done),
        tokens=tokens,
        start_s=start_s,
        end_s=writes_s[-1],
        ttft_mean_s=statistics.fmean(ttfts_s),
        ttft_p99_s=stats.percentile(ttfts_s, 99),
        itl_p99_s=stats.percentile(itls_s, 99),
        itl_of_requests_p99_s=stats.percentile(means_s, 99),
        tokens_per_s=middle_rate(writes_s),
        tokens_per_s_span=_rate(tokens, writes_s[-1] - start_s),
        peak_concurrency=peak_concurrency(done),
        accept_delay_mean_s=statistics.fmean(accept_s) if accept_s else None,
        accept_delay_p99_s=stats.percentile(accept_s, 99),
        parse_delay_mean_s=statistics.fmean(parse_s) if parse_s else None,
        parse_delay_p99_s=stats.percentile(parse_s, 99),
    )


def delays_s(served: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return how long requests lay unaccepted, then unparsed, where the kernel stamped them."""
    stamped = [(one, one.arrived_s) for one in served if one.arrived_s is not None]
    accept = [max(0.0, one.accepted_s - arrived_s) for one, arrived_s in stamped]
    parse = [max(0.0, one.parsed_s - max(arrived_s, one.accepted_s)) for one, arrived_s in stamped]
    return accept, parse


def middle_rate(writes_s: Sequence[float]) -> float | None:
    """Return writes per second between the first and the last tenth of sorted writes."""
    first = int(EDGE * len(writes_s))
    last = len(writes_s) - 1 - first
    return _rate(last - first, writes_s[last] - writes_s[first]) if last > first else None


def _rate(count: int, span_s: float) -> float | None:
    return count / span_s if span_s > 0 else None


def measured(reported: Reported, true: Truth, cpu_s: float, itl_of_requests: bool) -> Figures:
    """Return one run's figures: what is compared, then what stands beside it.

    An error is what the client reports minus the truth; of percentiles, those of the two samples.
    `cpu_s` is what the client took from its first request to its end. `itl_of_requests`: its ITL
    is a mean per request, and is held against that.
    """
    itl_p99_s = true.itl_of_requests_p99_s if itl_of_requests else true.itl_p99_s
    figures: Figures = {
        "tokens_per_s": true.tokens_per_s,
        "ttft_mean_error_s": _minus(reported.ttft_mean_s, true.ttft_mean_s),
        "ttft_p99_error_s": _minus(reported.ttft_p99_s, true.ttft_p99_s),
        "itl_p99_error_s": _minus(reported.itl_p99_s, itl_p99_s),
        "peak_concurrency": true.peak_concurrency,
        "cpu_s_per_100k_tokens": cpu_s / true.tokens * 100_000,
    }
    beside = {f.name: getattr(true, f.name) for f in fields(true)} | {
        f"reported_{f.name}": getattr(reported, f.name) for f in fields(reported)
    }
    beside |= {"itl_p99_s": itl_p99_s, "cpu_s": cpu_s, **figures}
    del beside["start_s"], beside["end_s"], beside["itl_of_requests_p99_s"]
    return beside


def _minus(reported: float | None, true: float | None) -> float | None:
    return None if reported is None or true is None else reported - true


COMPARED = (
    "tokens_per_s",
    "ttft_mean_error_s",
    "ttft_p99_error_s",
    "itl_p99_error_s",
    "peak_concurrency",
    "cpu_s_per_100k_tokens",
)


def row(
    client: str, streams: int | None, runs: Sequence[Figures], problems: Sequence[str]
) -> dict[str, Any]:
    """Return the medians over rounds of everything measured, with the range of what is compared.

    `n` is how many rounds they are of; `problems` says what became of the others.
    """
    made: dict[str, Any] = {"client": client, "streams": streams}
    made |= dict.fromkeys(COMPARED)
    for name in dict.fromkeys(itertools.chain(COMPARED, *runs)):
        values = [value for run in runs if (value := run.get(name)) is not None]
        made[name] = statistics.median(values) if values else None
        if name in COMPARED:
            made[f"{name}_min"] = min(values, default=None)
            made[f"{name}_max"] = max(values, default=None)
    return made | {"n": len(runs), "problems": list(problems)}
