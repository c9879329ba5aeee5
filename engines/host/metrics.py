"""What /metrics says: the front's own counts and the engine's, as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")


class Counts:
    """Totals since the start. Tokens are counted when their request ends."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.refused = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def add(self, finish_reason: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count one request that ended."""
        self.requests[finish_reason] += 1
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens


def render(counts: Counts, stats: Mapping[str, float]) -> str:
    """Return the exposition text; `stats` are the engine's, "running" and "waiting" among them."""
    return "\n".join([*_lines(counts, stats), ""])


def _lines(counts: Counts, stats: Mapping[str, float]) -> Iterator[str]:
    for name in ("running", "waiting"):
        full = f"headway:num_requests_{name}"
        yield from _head(full, "gauge", f"Requests {name} in the engine.")
        yield f"{full} {float(stats.get(name, 0))}"
    yield from _head("headway:requests_total", "counter", "Requests ended, by finish reason.")
    for reason in sorted({*FINISH_REASONS, *counts.requests}):
        yield f'headway:requests_total{{finish_reason="{reason}"}} {float(counts.requests[reason])}'
    totals = {
        "requests_refused": (counts.refused, "Requests refused because too many were unfinished."),
        "prompt_tokens": (counts.prompt_tokens, "Prompt tokens of requests that ended."),
        "generation_tokens": (counts.generation_tokens, "Tokens generated for those requests."),
    }
    for name, (value, text) in totals.items():
        yield from _head(f"headway:{name}_total", "counter", text)
        yield f"headway:{name}_total {float(value)}"
    for name, number in stats.items():
        if name not in ("running", "waiting"):
            kind = "counter" if name.endswith("_total") else "gauge"
            yield from _head(f"headway:{name}", kind, "As the engine reports it.")
            yield f"headway:{name} {float(number)}"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"
