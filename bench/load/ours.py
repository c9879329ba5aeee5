"""Our client as a process of its own, like the peers: `python ours.py …` writes one JSON object.

A stand-in for a night's Run: the same payloads, drive, records and metrics, without an engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway import arrivals, loadgen, metrics, stats, transport, validity
from headway.core import Capabilities, Case, Level, Run
from headway.transport import Target
from headway.workload import Prompts, Vocabulary, make_requests

# The ids of the tokenizer that the peers get their prompts from; nobody looks at them.
VOCABULARY = Vocabulary(128, tuple(range(8)))
CAN = Capabilities(ids_out=False)


def run(given: argparse.Namespace) -> Run:
    """Drive the load and return it as a Run."""
    prompts = Prompts("bench", given.prompt_tokens, given.output_tokens)
    requests = make_requests(prompts, given.requests, 0, given.seed, VOCABULARY)
    target = Target.parse(given.base_url)
    if given.rate is None:
        # The slots begin as in a night.
        fill_s = arrivals.default_fill_s(given.streams)
        offsets_s = arrivals.slot_offsets(given.streams, fill_s)
        level = Level("bench", len(requests), concurrency=given.streams, fill_s=fill_s)
    else:
        offsets_s = arrivals.offsets("poisson", len(requests), given.rate, given.seed)
        level = Level("bench", len(requests), rate_per_s=given.rate, arrivals="poisson")
    recipient = loadgen.Recipient(target, given.model, CAN)
    share = loadgen.Share(recipient, requests, level, offsets_s)
    measured = transport.run(loadgen.measure_with(share, given.workers))
    return Run(
        case=Case("mock", given.model, "bench", level.name),
        launch=1,
        attempt=1,
        level=level,
        started_at="",
        span_s=measured.span_s,
        records=measured.records,
        schedule_hash=arrivals.schedule_hash(offsets_s, level.concurrency),
        workload_hash="",
        client=measured.client,
    )


def figures(run: Run) -> dict[str, Any]:
    """Return what a report would say of a Run, in seconds; None where it says nothing."""
    table = metrics.TABLE
    ttft_s = [v for v in map(metrics.ttft_s, run.records) if v is not None]
    lag_s = [r.sent_s - r.due_s for r in run.records if r.sent_s is not None]
    return {
        "requests": sum(record.completed for record in run.records),
        "failures": sum(not record.completed for record in run.records),
        "ttft_mean_s": stats.mean(ttft_s),
        "ttft_p99_s": table["ttft_p99"].of_run(run),
        "itl_p99_s": table["itl_p99"].of_run(run),
        "send_lag_p50_s": None if run.level.closed else stats.percentile(lag_s, 50),
        "send_lag_p99_s": None if run.level.closed else stats.percentile(lag_s, 99),
        "client": dict(run.client),
        "invalid": list(validity.problems(run)),
        "errors": sorted({f"{r.error.kind}: {r.error.message}" for r in run.records if r.error}),
    }


def main(argv: Sequence[str]) -> int:
    """Drive once, write the figures, return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, required=True)
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--streams", type=int, help="closed loop")
    load.add_argument("--rate", type=float, help="Poisson arrivals, requests per second")
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    text = json.dumps(figures(run(given)), allow_nan=False, indent=1)
    given.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
