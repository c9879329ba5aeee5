"""Where the time of a request went: waiting in the client, on the way, in the engine.

The engine stamps when a request arrived and when its tokens left its step loop, on the machine's
one clock. Of a server without stamps only the waiting in the client is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headway import metrics, stats
from headway.core import RequestRecord, Run

Part = Callable[[RequestRecord], float | None]


@dataclass(frozen=True, slots=True)
class EngineSplit:
    """What the engine's own stamps say: its time, and what the protocol added to each event."""

    events: int
    client_wait_p50_s: float | None
    protocol_mean_s: float | None
    engine_ttft_p50_s: float | None
    engine_tpot_p50_s: float | None


def engine_split(run: Run) -> EngineSplit | None:
    """Return where the time of a Run's requests went; None where the server sends no stamps."""
    added = [at for record in run.records for at in _protocol_s(record)]
    if not added and median_of(run, engine_ttft_s) is None:
        return None
    return EngineSplit(
        events=len(added),
        client_wait_p50_s=median_of(run, waiting_s),
        protocol_mean_s=stats.mean(added),
        engine_ttft_p50_s=median_of(run, engine_ttft_s),
        engine_tpot_p50_s=median_of(run, engine_tpot_s),
    )


def median_of(run: Run, part: Part) -> float | None:
    """Return the median of a part over a Run's requests; None where no request has it."""
    return stats.median(_known(run.records, part))


def _known(records: Sequence[RequestRecord], part: Part) -> list[float]:
    return [value for value in map(part, records) if value is not None]


def _protocol_s(record: RequestRecord) -> Iterator[float]:
    for event in record.events:
        if record.completed and event.engine_at_s is not None:
            yield event.at_s - event.engine_at_s


def waiting_s(record: RequestRecord) -> float | None:
    """Sent − due: it waited in the client."""
    done = record.completed and record.sent_s is not None
    return record.sent_s - record.due_s if done and record.sent_s is not None else None


def engine_ttft_s(record: RequestRecord) -> float | None:
    """First token's departure − arrival at the engine."""
    if not record.completed or not record.events or record.engine_arrived_s is None:
        return None
    left = record.events[0].engine_at_s
    return None if left is None else left - record.engine_arrived_s


def protocol_ttft_s(record: RequestRecord) -> float | None:
    """What of TTFT neither the client nor the engine took: the way there and back."""
    whole, waited, inside = metrics.ttft_s(record), waiting_s(record), engine_ttft_s(record)
    if whole is None or waited is None or inside is None:
        return None
    return whole - waited - inside


def engine_tpot_s(record: RequestRecord) -> float | None:
    """(Last − first token's departure) / tokens after the first event: a decode step."""
    tpot = metrics.tpot_s(record)
    if tpot is None:
        return None
    first, last = record.events[0], record.events[-1]
    if first.engine_at_s is None or last.engine_at_s is None or last.at_s <= first.at_s:
        return None
    return tpot * (last.engine_at_s - first.engine_at_s) / (last.at_s - first.at_s)


def protocol_tpot_s(record: RequestRecord) -> float | None:
    """What of TPOT is not the engine's."""
    whole, inside = metrics.tpot_s(record), engine_tpot_s(record)
    return None if whole is None or inside is None else whole - inside
