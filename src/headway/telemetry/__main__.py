"""The watcher: `python -m headway.telemetry`, JSON lines in and out; ends when its input closes.

    {"do": "look", "gpus": [UUID, ...]}                     → {UUID: Reading, ...}
    {"do": "watch", "url": ..., "key": ..., "gpus": [...], "cpus": [...], "period_s": ...}
                                                            → {"watching": true}
    {"do": "stop"}                                          → Watched

It is a process of its own, so that the client's event loop is left alone, and keeps what it reads
as it came: answers of a server are parsed after the Run. Readings are taken at absolute times, by
one thread for each source, so that a server that takes its time delays nobody.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO
from urllib.parse import urlsplit

import pynvml

from headway import codec
from headway.telemetry import cpu, gpus, servers
from headway.telemetry.readings import Reading, Watched

SERVER_PERIOD_S, MACHINE_PERIOD_S, GPU_PERIOD_S = 1.0, 1.0, 0.5
SCRAPE_TIMEOUT_S = 2.0


class Scraper:
    """Asks a server for its /metrics over one connection, and keeps the answers packed."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=SCRAPE_TIMEOUT_S)
        self._path = parts.path
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._answers: list[tuple[float, bytes | None]] = []
        self._refused = False

    def __call__(self) -> None:
        """Ask once, unless there is no such page. What is stamped is the arrival."""
        if self._refused:
            return
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            answer = self._connection.getresponse()
            body = answer.read()
            self._refused = not self._answers and 400 <= answer.status < 500
            packed = zlib.compress(body, 1) if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            self._connection.close()
            packed = None
        self._answers.append((time.monotonic(), packed))

    def readings(self) -> tuple[Reading, ...]:
        """Parse all answers; none of a server that says nothing of what is asked for."""
        self._connection.close()
        found = tuple(
            Reading(at_s, None if packed is None else servers.values(_text(packed)))
            for at_s, packed in self._answers
        )
        return found if any(one.values is not None for one in found) else ()


def _text(packed: bytes) -> str:
    return zlib.decompress(packed).decode("utf-8", "replace")


class Sampler:
    """Takes a reading now, then one each period by the clock, then a last one at the end."""

    def __init__(self, period_s: float, take: Callable[[], None]) -> None:
        self._take = take
        self._period_s = period_s
        self._ended = threading.Event()
        take()
        self._start_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 1
        while not self._ended.wait(self._start_s + number * self._period_s - time.monotonic()):
            self._take()
            # One that took longer than a period leaves some out, and keeps to the times.
            number = int((time.monotonic() - self._start_s) / self._period_s) + 1

    def end(self) -> None:
        """Take the last reading."""
        self._ended.set()
        self._thread.join()
        self._take()


class Watch:
    """All that is read around one Run."""

    def __init__(self, order: Mapping[str, Any], handles: Mapping[str, Any]) -> None:
        self._machine: list[Reading] = []
        self._gpus: dict[str, list[Reading]] = {uuid: [] for uuid in order["gpus"]}
        self._scraper = Scraper(order["url"], order.get("key")) if order.get("url") else None
        self._samplers: list[Sampler] = []
        family, cores = os.getppid(), set(order["cpus"])
        self._start(MACHINE_PERIOD_S, lambda: self._machine.append(cpu.read(family, cores)))
        if self._gpus:
            chosen = {uuid: handles[uuid] for uuid in self._gpus}
            self._start(GPU_PERIOD_S, lambda: self._read_gpus(chosen))
        if self._scraper is not None:
            self._start(float(order.get("period_s") or SERVER_PERIOD_S), self._scraper)

    def _start(self, period_s: float, take: Callable[[], None]) -> None:
        self._samplers.append(Sampler(period_s, take))

    def _read_gpus(self, handles: Mapping[str, Any]) -> None:
        for uuid, handle in handles.items():
            self._gpus[uuid].append(gpus.read(pynvml, handle))

    def end(self) -> Watched:
        """Stop reading, and return what was read."""
        for sampler in self._samplers:
            sampler.end()
        return Watched(
            () if self._scraper is None else self._scraper.readings(),
            tuple(one for one in self._machine if one.values is not None),
            {uuid: tuple(readings) for uuid, readings in self._gpus.items()},
        )


def main(lines: Iterator[str], out: TextIO) -> None:
    """Answer each line, until there are no more."""

    def say(answer: object) -> None:
        out.write(json.dumps(codec.encode(answer), allow_nan=False) + "\n")
        out.flush()

    handles = gpus.opened(pynvml)
    say({"ready": True, "gpus": list(handles)})
    watch: Watch | None = None
    for line in lines:
        order = json.loads(line)
        named: Sequence[str] = [uuid for uuid in order.get("gpus", ()) if uuid in handles]
        if order["do"] == "look":
            say({uuid: gpus.read(pynvml, handles[uuid]) for uuid in named})
        elif order["do"] == "watch":
            if watch is not None:
                watch.end()  # of a Run that nobody asked the end of
            watch = Watch(order | {"gpus": named}, handles)
            say({"watching": True})
        else:
            say(Watched() if watch is None else watch.end())
            watch = None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for our parent, who ends us
    with contextlib.suppress(BrokenPipeError):
        main(iter(sys.stdin), sys.stdout)
