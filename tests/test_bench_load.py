"""bench/load: what peers report is read right, held against the truth, in a fair order."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import load as bench
import load.clients
import load.environments
import load.figures
import load.memory
import load.processes
import load.server
import load.table
import load.work
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.mock_server.truth import Record

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "peer_results"
CLIENTS = bench.clients.CLIENTS
PEERS = [name for name in CLIENTS if name != "headway"]
# Where each peer leaves its result. Those here are of real runs of the pinned versions: 20 requests
# by 4 streams, every fifth of which was refused; cut to what says something.
FILES = dict.fromkeys(PEERS, "result.json") | {"aiperf": "profile_export_aiperf.json"}
KEYS = ("tokens_per_s", "ttft_mean_error_s", "ttft_p99_error_s", "itl_p99_error_s")
KEYS += ("peak_concurrency", "cpu_s_per_100k_tokens")


def record(
    number: int,
    parsed_s: float,
    writes_s: tuple[float, ...],
    arrived_s: float | None = None,
    accepted_s: float = 0.0,
) -> Record:
    return Record(
        number=number,
        connection=number,
        endpoint="completions",
        stream=True,
        prompt_tokens=16,
        max_tokens=len(writes_s),
        accepted_s=accepted_s,
        arrived_s=arrived_s,
        parsed_s=parsed_s,
        due_s=writes_s,
        writes_s=writes_s,
        tokens=(1,) * len(writes_s),
        fault=None,
        ended="done",
        ended_s=max((parsed_s, *writes_s)),
        blocked_bytes=0,
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Record]:
    gaps = st.floats(0.001, 1.0)
    made = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        at_s = draw(st.floats(0.0, 100.0))
        writes = np.cumsum([at_s, *draw(st.lists(gaps, min_size=2, max_size=8))])[1:]
        made.append(record(number, at_s, tuple(map(float, writes))))
    return made


# What peers say


def peer_folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / FILES[name]).write_text((RESULTS / f"{name}.json").read_text("utf-8"), "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "ttft_mean_s", "ttft_p99_s", "itl_p99_s"),
    [
        ("vllm_bench_serve", 0.10666606, 0.11160073, 0.02651406),
        ("guidellm", 0.10744464, 0.12374878, 0.02029031),
        ("aiperf", 0.10954433, 0.12794507, 0.03026397),
    ],
)
def test_what_a_peer_reports_is_read(name, ttft_mean_s, ttft_p99_s, itl_p99_s, tmp_path):
    said = CLIENTS[name].read(peer_folder(tmp_path, name))
    assert (said.requests, said.failures) == (16, 4)
    assert said.ttft_mean_s == pytest.approx(ttft_mean_s, abs=1e-8)
    assert said.ttft_p99_s == pytest.approx(ttft_p99_s, abs=1e-8)
    assert said.itl_p99_s == pytest.approx(itl_p99_s, abs=1e-8)
    assert (said.send_lag_p99_s is not None) == CLIENTS[name].lags


def test_how_late_guidellm_sent_is_worked_out_from_its_requests(tmp_path):
    folder = peer_folder(tmp_path, "guidellm")
    (run,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    times = [one["info"]["timings"] for one in run["requests"]["successful"]]
    late = [one["request_start"] - one["targeted_start"] for one in times]
    assert len(late) == 16
    said = CLIENTS["guidellm"].read(folder)
    assert said.send_lag_p50_s == pytest.approx(np.percentile(late, 50))
    assert said.send_lag_p99_s == pytest.approx(np.percentile(late, 99))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": []}', '{"completed": null'])
@pytest.mark.parametrize("name", PEERS)
def test_a_result_that_is_not_as_expected_is_said_to_be_so(name, text, tmp_path):
    (tmp_path / FILES[name]).write_text(text, "utf-8")
    with pytest.raises((ValueError, KeyError, TypeError)):
        CLIENTS[name].read(tmp_path)


@pytest.mark.parametrize("name", CLIENTS)
def test_all_are_asked_for_the_same_load(name, tmp_path):
    asked = bench.clients.Load("http://127.0.0.1:9", "mock", tmp_path / "t", 448, 5, streams=64)
    closed = " ".join(CLIENTS[name].command(asked, tmp_path))
    opened = " ".join(
        CLIENTS[name].command(replace(asked, streams=None, rate_per_s=200.0), tmp_path)
    )
    for wanted in ("http://127.0.0.1:9", "mock", "448", "5", "64", str(tmp_path)):
        assert wanted in closed
    assert "200.0" in opened
    assert "200.0" not in closed


# Against the truth


def test_errors_are_what_was_reported_minus_what_was_written():
    log = [
        record(1, 10.0, (10.1, 10.12, 10.16), arrived_s=9.99, accepted_s=9.95),
        record(2, 10.05, (10.25, 10.27, 10.29), arrived_s=10.0, accepted_s=10.03),
        record(3, 10.2, (10.3, 10.32, 10.34)),
        record(4, 10.2, ()),
    ]
    true = bench.figures.truth(log)
    assert (true.requests, true.tokens, true.peak_concurrency) == (3, 9, 2)
    ttft_s, itl_s = [0.1, 0.2, 0.1], [0.02, 0.04, 0.02, 0.02, 0.02, 0.02]
    assert true.ttft_mean_s == pytest.approx(statistics.fmean(ttft_s))
    assert true.ttft_p99_s == pytest.approx(np.percentile(ttft_s, 99))
    assert true.itl_p99_s == pytest.approx(np.percentile(itl_s, 99))
    assert true.itl_of_requests_p99_s == pytest.approx(np.percentile([0.03, 0.02, 0.02], 99))
    assert true.tokens_per_s_span == pytest.approx(9 / 0.34)
    assert true.accept_delay_mean_s == pytest.approx((0.0 + 0.03) / 2)
    assert true.parse_delay_mean_s == pytest.approx((0.01 + 0.02) / 2)

    said = bench.figures.Reported(3, 1, ttft_mean_s=0.15, ttft_p99_s=0.25, itl_p99_s=None)
    figures = bench.figures.measured(said, true, cpu_s=0.9, itl_of_requests=False)
    assert figures["ttft_mean_error_s"] == pytest.approx(0.15 - 0.4 / 3)
    assert figures["ttft_p99_error_s"] == pytest.approx(0.25 - np.percentile(ttft_s, 99))
    assert figures["itl_p99_error_s"] is None
    assert figures["cpu_s_per_100k_tokens"] == pytest.approx(10_000)
    assert (figures["requests"], figures["reported_requests"]) == (3, 3)
    assert figures["reported_failures"] == 1


@given(log=logs(), late_s=st.floats(-0.01, 1.0), of_requests=st.booleans())
def test_who_is_late_by_so_much_is_wrong_by_so_much(log, late_s, of_requests):
    true = bench.figures.truth(log)
    itl_s = true.itl_of_requests_p99_s if of_requests else true.itl_p99_s
    said = bench.figures.Reported(
        len(log), 0, true.ttft_mean_s + late_s, true.ttft_p99_s + late_s, itl_s + late_s
    )
    figures = bench.figures.measured(said, true, 1.0, of_requests)
    for name in ("ttft_mean_error_s", "ttft_p99_error_s", "itl_p99_error_s"):
        assert figures[name] == pytest.approx(late_s, abs=1e-9)


def test_a_log_without_a_token_has_no_figures():
    assert bench.figures.truth([record(1, 1.0, ())]) is None
    assert bench.figures.truth([]) is None


def test_the_rate_kept_up_is_that_between_start_and_end():
    steady = [number / 1000 for number in range(1000)]
    assert bench.figures.middle_rate(steady) == pytest.approx(1000)
    ramp = [-9.0 + number / 10 for number in range(90)]  # slow: less than a tenth of all
    assert bench.figures.middle_rate([*ramp, *steady]) == pytest.approx(1000)
    assert bench.figures.middle_rate([1.0]) is None


def test_a_row_has_medians_and_their_range():
    runs = [dict.fromkeys(KEYS, value) for value in (3.0, 1.0, 2.0)]
    runs[0] = runs[0] | {"itl_p99_error_s": None}
    row = bench.figures.row("guidellm", 64, runs, ["round 4: not finished within 9 s"])
    assert [row[name] for name in ("client", "streams", "n")] == ["guidellm", 64, 3]
    assert [row[f"tokens_per_s{end}"] for end in ("", "_min", "_max")] == [2.0, 1.0, 3.0]
    assert [row[f"itl_p99_error_s{end}"] for end in ("", "_min", "_max")] == [1.5, 1.0, 2.0]
    assert row["problems"] == ["round 4: not finished within 9 s"]


# The order


@given(rounds=st.integers(1, 4), seed=st.integers(0, 10))
def test_runs_are_interleaved_and_seeded(rounds, seed):
    streams = (64, 256)
    jobs = bench.work.jobs(tuple(CLIENTS), streams, rounds, seed)
    assert jobs == bench.work.jobs(tuple(CLIENTS), streams, rounds, seed)
    opened = sum(client.lags for client in CLIENTS.values())
    each = len(CLIENTS) * len(streams) + opened
    assert [job.round for job in jobs] == [n for n in range(1, rounds + 1) for _ in range(each)]
    counts = Counter((job.client, job.streams) for job in jobs)
    assert set(counts.values()) == {rounds}
    assert len(counts) == each


def test_rounds_differ_in_their_order_and_so_do_seeds():
    def order(seed: int, number: int) -> list[tuple[str, int | None]]:
        jobs = bench.work.jobs(tuple(CLIENTS), (64, 256, 512), 2, seed)
        return [(job.client, job.streams) for job in jobs if job.round == number]

    assert order(1, 1) != order(1, 2)
    assert order(1, 1) != order(2, 1)


@given(st.integers(1, 2000), st.floats(0.1, 60.0))
def test_a_closed_loop_lasts_whole_waves(streams, seconds):
    requests = bench.work.num_requests(streams, seconds)
    assert requests % streams == 0
    waves = requests // streams
    assert waves >= 2
    assert waves == 2 or math.isclose(waves * 1.36, seconds, abs_tol=0.7)


# Doing them

OPTIONS = bench.work.Options(seconds=1.0, limit_s=20.0, seed=1, server_core=0, client_core=0)


def fake(job: Any, options: Any) -> dict[str, float | None]:
    if (job.client, job.streams, job.round) == ("headway", 64, 2):
        raise bench.processes.RunFailed("not finished within 20 s")
    return dict.fromkeys(KEYS, float(job.round))


def test_what_does_not_finish_is_said_and_the_others_go_on():
    jobs = bench.work.jobs(["headway"], [16, 64], 3, 1)
    results = bench.work.run(jobs, OPTIONS, lambda text: None, fake)
    small, large = bench.work.rows(results, ["headway"], [16, 64])
    assert (small["n"], small["problems"]) == (3, [])
    assert (large["n"], large["problems"]) == (2, ["round 2: not finished within 20 s"])
    assert large["tokens_per_s"] == 2.0
    text = bench.table.render([small, large], [])
    assert "2 of 3" in text
    assert "…" not in text
    assert "headway, 64 streams: round 2: not finished within 20 s" in text


def test_an_interrupt_keeps_what_there_is():
    jobs = bench.work.jobs(["headway"], [16], 3, 1)

    def interrupted(job: Any, options: Any) -> dict[str, float | None]:
        if job.round == 2:
            raise KeyboardInterrupt
        return fake(job, options)

    results = bench.work.run(jobs, OPTIONS, lambda text: None, interrupted)
    assert results.interrupted
    (row,) = bench.work.rows(results, ["headway"], [16])
    assert row["n"] == 1
    (never,) = bench.work.rows(results, ["headway"], [17])
    assert never["problems"] == ["there was no time for it"]


def test_who_is_not_installed_is_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    jobs = bench.work.jobs(["guidellm", "headway"], [16], 2, 1)
    results = bench.work.run(jobs, OPTIONS, lambda text: None, fake)
    closed = bench.work.rows(results, ["guidellm", "headway"], [16])
    opened = bench.work.rows(results, ["guidellm", "headway"], [None])
    text = bench.table.render(closed, opened)
    (missing, ours) = closed
    assert (missing["n"], missing["tokens_per_s"], ours["n"]) == (0, None, 2)
    said = "guidellm==0.8.1 is not installed (--install makes an environment for it)"
    assert missing["problems"] == [said]
    assert f"guidellm, 16 streams: {said}" in text
    assert f"guidellm, open loop: {said}" in text
    json.dumps([*closed, *opened], allow_nan=False)


def core() -> int:
    return min(os.sched_getaffinity(0))


def test_a_client_that_does_not_end_is_ended_with_all_below_it(tmp_path):
    worker = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    command = [sys.executable, "-c", parent]
    with pytest.raises(bench.processes.RunFailed, match=r"not finished within 3 s"):
        bench.processes.run_client(command, core(), tmp_path, 3.0, {})
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_a_client_that_fails_says_why(tmp_path):
    command = [sys.executable, "-c", "import sys; print('reason'); sys.exit('no such model')"]
    with pytest.raises(bench.processes.RunFailed, match=r"^ended with 1: no such model$"):
        bench.processes.run_client(command, core(), tmp_path, 60.0, {})


def test_cpu_time_is_that_of_workers_too_and_one_core_is_kept_to(tmp_path):
    burn = "import os, time; print(os.sched_getaffinity(0), os.environ['MARK'], flush=True)\n"
    burn += "while time.process_time() < 0.4: pass"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
    command = [sys.executable, "-c", parent + burn]
    before = os.sched_getaffinity(0)
    cpu = bench.processes.run_client(command, core(), tmp_path, 60.0, {"MARK": "yes"})
    assert os.sched_getaffinity(0) == before
    assert (tmp_path / "client.out").read_text().split("\n") == [f"{{{core()}}} yes"] * 2 + [""]
    assert cpu.total_s >= 0.8
    halfway = cpu.samples[len(cpu.samples) // 2]
    assert cpu.before(halfway[0]) == pytest.approx(halfway[1])
    assert cpu.before(0.0) == cpu.samples[0][1]
    assert cpu.before(time.monotonic()) == cpu.total_s


def test_memory_held_is_the_payload_and_less_than_a_hundred_bytes_an_event(tmp_path):
    held = bench.memory.held(tmp_path, streams=20, requests=40, core=core())
    assert held.events == 40 * 64
    assert held.held_bytes > held.payload_bytes > held.events * 20
    assert 16 < held.overhead_per_event_bytes < 100
    assert held.overhead_per_event_bytes * held.events == held.held_bytes - held.payload_bytes


def test_memory_held_of_what_was_spilled_is_a_little_for_each_request(tmp_path):
    few, many = (
        bench.memory.held(tmp_path, streams=20, requests=n, core=core(), spill_bytes=0)
        for n in (20, 40)
    )
    assert many.payload_bytes == 2 * few.payload_bytes
    assert (many.held_bytes - few.held_bytes) / 20 < 1000


# The command

needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="a core for the server and one for the client"
)
COMMAND = [sys.executable, "bench/load", "--clients", "headway", "--rounds", "1"]


@needs_two_cores
def test_the_command_compares_our_client_with_the_truth():
    command = [*COMMAND, "--streams", "4", "8", "--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert any("tokens/s" in line for line in lines)
    said = json.loads(last)
    assert [(row["client"], row["streams"]) for row in said["rows"]] == [
        ("headway", 4),
        ("headway", 8),
    ]
    for row in said["rows"]:
        assert row["n"] == 1
        assert row["peak_concurrency"] == row["streams"]
        assert row["requests"] == row["reported_requests"] == 2 * row["streams"]
        assert row["tokens"] == 64 * row["requests"]
        assert all(row[key] is not None for key in KEYS)
    (opened,) = said["open_loop"]
    assert opened["requests"] == 200
    assert opened["reported_send_lag_p99_s"] is not None
    assert said["interrupted"] is False


def marked(text: str) -> list[str]:
    """The processes that have a text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@needs_two_cores
def test_an_interrupted_command_prints_what_there_is_and_leaves_nothing_running(tmp_path):
    mark = f"BENCH_LOAD_TEST={tmp_path}"
    process = subprocess.Popen(
        [*COMMAND, "--streams", "4", "--seconds", "100"],
        cwd=ROOT,
        env={**os.environ, "BENCH_LOAD_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        process.stderr.readline()
        until = time.monotonic() + 30
        while len(marked(mark)) < 5 and time.monotonic() < until:  # two, each under a supervisor
            time.sleep(0.05)
        assert len(marked(mark)) >= 5
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 3
    said = json.loads(out.splitlines()[-1])
    assert said["interrupted"] is True
    assert said["rows"][0]["problems"] == ["there was no time for it"]
    assert marked(mark) == []


def test_goals_are_held_against_the_best_peer_whichever_way_an_error_points():
    names = ("tokens_per_s", "ttft_mean_error_s", "ttft_p99_error_s", "itl_p99_error_s")

    def row(client, streams, *values):
        return {"client": client, "streams": streams, **dict(zip(names, values, strict=True))}

    closed = [
        row("headway", 64, 3e3, 0.001, 0.0, 0.0),
        row("headway", 512, 24e3, -0.011, 0.03, -0.002),
        row("headway", 1024, 48e3, 0.0, 0.0, 0.0),
        row("a", 512, 20e3, 0.1, 0.0, 0.0),
        row("b", 512, 20e3, -0.05, 0.0, 0.0),
        row("a", 1024, 25e3, 0.0, 0.0, 0.0),
        row("b", 1024, None, None, None, None),
    ]
    opened = [{"client": "headway", "streams": None, "reported_send_lag_p99_s": 0.0005}]
    found = bench.goals.goals(closed, opened, None)
    assert [goal.met for goal in found] == [
        *(True, False),
        *(False, False),
        *(True, True, False, True, None),
    ]
    assert found[1].value == pytest.approx(48 / 25)
    assert found[3].value == pytest.approx(0.011 / 0.05)
    text = bench.table.render_goals(found)
    assert "MISSED" in text
    assert "not measured" in text


def test_goals_of_nothing_are_not_met():
    assert {goal.met for goal in bench.goals.goals([], [], None)} == {None}
