"""Through the shipped command: what servers say is in the report, and a stranger is noticed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import night, suite
from headway.night import Night, real, running
from headway.night.cores import Cores

SUITE = """
[suite]
model = "fake"
launches = 1
idle_timeout_s = 5
calibrate = false
[budget]
night_minutes = 2
[engine.fake_a]
kind = "fake"
args = {{ ttft_s = 0.05, itl_s = 0.02 }}
port = {port}
[workload.w]
prompt_tokens = 8
output_tokens = 28
concurrency = [{levels}]
requests = 16
[baseline]
metrics = []
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write(workspace: Any, port: int, levels: str) -> None:
    (workspace.folder / "suites" / "watched.toml").write_text(
        SUITE.format(port=port, levels=levels)
    )


def series(run: dict[str, Any]) -> dict[str, list[float]]:
    return {one["name"]: one["values"] for one in run["series"] if one["source"] == "server"}


def test_the_server_s_gauges_have_the_level_as_their_peak(workspace: Any) -> None:
    write(workspace, free_port(), "2, 4")
    done = workspace.run("run", "watched")
    assert done.code == 0
    cases = {case["level"]: case for case in done.report()["cases"] if case["level"]}
    for level, concurrency in (("c2", 2), ("c4", 4)):
        (run,) = cases[level]["runs"]
        found = series(run)
        assert max(found["running"]) == concurrency
        assert max(found["waiting"]) == 0
        assert found["generation_tokens"][-1] == 16 * 28
        assert run["engine"]["server_running_max"] == concurrency
        assert run["engine"]["server_generation_tokens"] == 16 * 28
        assert run["engine"]["server_scrapes_failed"] == 0
        assert run["invalid"] == []
        times = next(one["at_s"] for one in run["series"] if one["name"] == "running")
        assert times[0] < 0 < times[-1]
        assert times[-1] >= run["span_s"] - 0.001
    assert "fake_a: at most 4 running and 0 waiting" in done.text
    text = (done.night / "report.md").read_text()
    assert "fake_a w c2: at most 2 running and 0 waiting" in text
    assert "cores: client and engines shared" in text or "cores: engines on" in text


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """Somebody else, who sends requests to the engine all the time."""
    over = threading.Event()
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 28}

    def send() -> None:
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException):
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                connection.getresponse().read()
            connection.close()
            over.wait(0.02)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_stranger_at_the_engine_makes_the_run_invalid(workspace: Any) -> None:
    port = free_port()
    write(workspace, port, "3")
    with stranger(port):
        done = workspace.run("run", "watched")
    assert done.code == 3
    (case,) = (case for case in done.report()["cases"] if case["level"])
    (run,) = case["runs"]
    said = " ".join(run["invalid"])
    assert "the server had 5 requests at once, the client never more than 3 in flight" in said
    assert "tokens, 448 came here: somebody else sends to it" in said
    assert len(case["replaced"]) == 2
    judged = {cell["verdict"] for cell in done.report()["cells"] if cell["unit"] == "tokens/s"}
    assert judged == {"INVALID"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_client_and_engine_keep_to_their_own_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, night_of: Callable[..., Night]
) -> None:
    mine = sorted(os.sched_getaffinity(0))
    client, engine = mine[:1], mine[-1:]
    monkeypatch.setattr(real, "parted_here", lambda workers: Cores(tuple(client), tuple(engine)))
    path = tmp_path / "pinned.toml"
    path.write_text(SUITE.format(port=free_port(), levels="1").replace("28", "3"))
    seen = []
    for pin in ("true", "false"):
        loaded = suite.load(path, [f"suite.pin={pin}"])
        begun = running.loadgen.measure_with

        async def measured(*given: Any, begun: Any = begun) -> Any:
            pids = running.our_processes()
            seen.append((os.sched_getaffinity(0), [os.sched_getaffinity(p) for p in pids]))
            return await begun(*given)

        monkeypatch.setattr(running.loadgen, "measure_with", measured)
        made = night_of(loaded)
        made.expect(made.suite.cases())
        night.measure_all(made, made.cases)
        (record,) = made.results.launches
        assert record.failure is None
        assert record.cpus == (tuple(engine) if pin == "true" else ())
        monkeypatch.setattr(running.loadgen, "measure_with", begun)
    (pinned, family), (free, _) = seen
    assert pinned == set(client)
    assert not family or set(engine) in family
    assert free == set(mine)
    assert os.sched_getaffinity(0) == set(mine)
