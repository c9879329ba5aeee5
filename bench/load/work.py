"""Which runs there are, in which order, and doing them one by one."""

from __future__ import annotations

import dataclasses
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load import figures, server, tokenizer
from load.clients import CLIENTS, OUTPUT_TOKENS, Client, Load
from load.processes import RunFailed, run_client
from load.server import ITL_S, MODEL, TTFT_S

# How long a request takes that nobody delays: what a wave of requests in closed loop takes.
REQUEST_S = TTFT_S + (OUTPUT_TOKENS - 1) * ITL_S
OPEN_RATE_PER_S = 200.0
Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Job:
    """One run; `streams` is None for the open loop."""

    round: int
    client: str
    streams: int | None


@dataclass(frozen=True, slots=True)
class Options:
    """Of every run: about how long it lasts, when it is given up, and the two cores."""

    seconds: float
    limit_s: float
    seed: int
    server_core: int
    client_core: int


@dataclass(slots=True)
class Results:
    """The figures of each run that came to its end, and what became of the others."""

    runs: dict[Key, list[figures.Figures]] = field(default_factory=dict)
    problems: dict[Key, list[str]] = field(default_factory=dict)
    interrupted: bool = False


def jobs(clients: Sequence[str], streams: Sequence[int], rounds: int, seed: int) -> list[Job]:
    """Return all runs, round by round, each round in a random order of its own.

    What the machine does meanwhile then meets every client alike. Open loop is for those that say
    how late their requests leave.
    """
    made = []
    for number in range(1, rounds + 1):
        closed = [Job(number, *pair) for pair in itertools.product(clients, streams)]
        opened = [Job(number, name, None) for name in clients if CLIENTS[name].lags]
        order = [*closed, *opened]
        random.Random(f"load/{seed}/{number}").shuffle(order)
        made += order
    return made


def num_requests(streams: int | None, seconds: float) -> int:
    """Return how many requests last about `seconds`: whole waves in closed loop, two at least."""
    if streams is None:
        return max(1, round(OPEN_RATE_PER_S * seconds))
    return streams * max(2, round(seconds / REQUEST_S))


def missing(client: Client) -> str | None:
    """Return why a client cannot be run here; None if it can."""
    if client.package is None or client.package.made:
        return None
    return f"{client.package.pin} is not installed (--install makes an environment for it)"


def run(
    todo: Sequence[Job],
    options: Options,
    say: Callable[[str], object],
    do: Callable[[Job, Options], figures.Figures] | None = None,
) -> Results:
    """Do all runs; SIGINT ends it with what there is, and nothing left running."""
    do, results, started_s = do or one, Results(), time.monotonic()
    try:
        for number, job in enumerate(todo, 1):
            key = job.client, job.streams
            absent = missing(CLIENTS[job.client])
            if absent is not None:
                results.problems[key] = [absent]
                continue
            load = "open loop" if job.streams is None else f"{job.streams} streams"
            what = f"{number}/{len(todo)}  round {job.round}: {job.client}, {load}"
            say(f"{time.monotonic() - started_s:6.0f} s  {what}\n")
            try:
                results.runs.setdefault(key, []).append(do(job, options))
            except RunFailed as error:
                results.problems.setdefault(key, []).append(f"round {job.round}: {error}")
                say(f"{time.monotonic() - started_s:6.0f} s  {what}: {error}\n")
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def one(job: Job, options: Options) -> figures.Figures:
    """Run a client once against a server of its own; return the figures, or raise RunFailed."""
    client = CLIENTS[job.client]
    with tempfile.TemporaryDirectory(prefix="bench-load-") as name:
        folder = Path(name)
        tokenizer.write(folder / "tokenizer")
        with server.serving(options.server_core, folder) as serving:
            load = Load(
                base_url=serving.base_url,
                model=MODEL,
                tokenizer=folder / "tokenizer",
                requests=num_requests(job.streams, options.seconds),
                seed=options.seed + job.round,
                streams=job.streams,
                rate_per_s=OPEN_RATE_PER_S if job.streams is None else None,
            )
            command = client.command(load, folder)
            cpu = run_client(command, options.client_core, folder, options.limit_s, client.env)
        true = figures.truth(server.served(folder))
        if true is None:
            raise RunFailed("the server answered none of its requests")
        try:
            reported = client.read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise RunFailed(f"its result file is not as expected ({problem})") from error
    if job.streams is not None:
        reported = dataclasses.replace(reported, send_lag_p50_s=None, send_lag_p99_s=None)
    cpu_s = cpu.total_s - cpu.before(true.start_s)
    return figures.measured(reported, true, cpu_s, client.itl_of_requests)


def rows(
    results: Results, clients: Sequence[str], streams: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Return a row for each client at each load; those not run say why."""
    made = []
    for client, load in itertools.product(clients, streams):
        key = client, load
        runs, problems = results.runs.get(key, []), results.problems.get(key, [])
        if not runs and not problems:
            problems = ["there was no time for it"]
        of = "requests" if CLIENTS[client].itl_of_requests else "gaps"
        made.append(figures.row(client, load, runs, problems) | {"itl_of": of})
    return made


def describe(options: Options) -> Mapping[str, Any]:
    """Return what all runs had in common, for the JSON."""
    return {
        **dataclasses.asdict(options),
        "ttft_s": TTFT_S,
        "itl_s": ITL_S,
        "output_tokens": OUTPUT_TOKENS,
        "open_rate_per_s": OPEN_RATE_PER_S,
    }
