"""The watcher process: what it reads around a Run, of a real server and a planted driver."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.night.asked import ReferenceFailure
from headway.night.cores import Cores
from headway.night.watch import Telemetry, watcher

# A driver that reads what its cards say from a file, which a test changes while they are watched.
PYNVML = """
import json, os
class NVMLError(Exception): pass
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
def _cards(): return json.load(open(os.environ["PLANTED_CARDS"]))
def nvmlInit(): pass
def nvmlDeviceGetCount(): return len(_cards())
def nvmlDeviceGetHandleByIndex(index): return list(_cards())[index]
def nvmlDeviceGetUUID(uuid): return uuid
def _say(key):
    def say(uuid, *_):
        card = _cards()[uuid]
        if key not in card: raise NVMLError("Not Supported")
        return card[key]
    return say
nvmlDeviceGetPowerUsage = _say("milliwatts")
nvmlDeviceGetTotalEnergyConsumption = _say("millijoules")
nvmlDeviceGetClockInfo = _say("mhz")
nvmlDeviceGetTemperature = _say("celsius")
nvmlDeviceGetCurrentClocksEventReasons = _say("reasons")
class _Of:
    def __init__(self, **named): self.__dict__.update(named)
def nvmlDeviceGetMemoryInfo(uuid): return _Of(used=_say("used")(uuid))
def nvmlDeviceGetComputeRunningProcesses(uuid):
    listed = _say("processes")(uuid).items()
    return [_Of(pid=int(pid), usedGpuMemory=held) for pid, held in listed]
nvmlDeviceGetGraphicsRunningProcesses = _say("graphics")
"""
SAYS = "headway:num_requests_running {}\nheadway:generation_tokens_total {}\n"


@contextlib.contextmanager
def server(answers: list[tuple[int, str]]) -> Iterator[tuple[str, list[str | None]]]:
    """A server that gives these answers in order, then the last for ever; and the keys it saw."""
    keys: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/metrics", keys
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Plants a driver with one card; what it says is changed by calling it."""
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PLANTED_CARDS", str(tmp_path / "cards.json"))

    def say(**card: object) -> None:
        whole = tmp_path / "cards.new"
        whole.write_text(json.dumps({"GPU-a": card}))
        whole.replace(tmp_path / "cards.json")

    say(used=1000, processes={})
    return say


def test_a_server_is_read_before_during_and_after(tmp_path):
    answers = [(200, SAYS.format(k, 10 * k)) for k in range(40)]
    with server(answers) as (url, keys), watcher(tmp_path / "log") as running:
        before_s = time.monotonic()
        running.begin(url, "secret", (), ())
        begun_s = time.monotonic()
        time.sleep(2.2)
        ending_s = time.monotonic()
        said = running.end()
    values = [one.values["running"] for one in said.server if one.values]
    assert len(values) >= 3
    assert values == list(range(len(values)))
    first, *inside, last = [one.at_s for one in said.server]
    assert before_s <= first <= begun_s
    assert ending_s <= last
    assert all(begun_s < at_s < last for at_s in inside)
    assert set(keys) == {"Bearer secret"}
    assert len(said.machine) >= 2
    assert said.machine[0].at_s <= begun_s
    assert said.gpus == {}


def test_a_scrape_that_fails_is_a_gap_and_a_server_without_the_page_is_left_alone(tmp_path):
    fine, broken = (200, SAYS.format(1, 5)), (500, "down")
    with watcher(tmp_path / "log") as running:
        with server([fine, broken, fine]) as (url, _):
            running.begin(url, None, (), ())
            time.sleep(1.8)
            first, second, *rest = [one.values for one in running.end().server]
        assert first == {"running": 1, "generation_tokens": 5}
        assert second is None
        assert rest
        assert all(one == first for one in rest)
        with server([(404, "no"), fine]) as (url, keys):
            running.begin(url, None, (), ())
            time.sleep(1.3)
            assert running.end().server == ()
            assert len(keys) == 1
        # Nobody listens there any more; and somewhere nothing is to be asked.
        for nowhere in (url, None):
            running.begin(nowhere, None, (), ())
            assert running.end().server == ()


def test_a_planted_card_is_looked_at_and_watched(tmp_path, cards):
    with watcher(tmp_path / "log") as running:
        assert running.gpus == ("GPU-a",)
        assert running.look(running.gpus)["GPU-a"].values == {"memory": 1000.0}
        cards(used=2000, milliwatts=300_000, reasons=64, processes={"7": 500})
        running.begin(None, None, running.gpus, ())
        time.sleep(1.2)
        said = running.end().gpus["GPU-a"]
    assert len(said) >= 3  # before, in it, after
    assert said[1].values == {"memory": 2000.0, "power": 300.0, "reasons": 64.0}
    assert said[1].processes == {"7": 500}


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_it_ends_when_its_input_closes_and_no_sooner(tmp_path):
    with watcher(tmp_path / "log") as running:
        process = running.process._process
        os.kill(process.pid, signal.SIGINT)  # a terminal's, which is for us
        running.begin(None, None, (), ())
        running.end()
    assert process.returncode == 0


def test_it_ends_with_us_when_we_are_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from headway.night.watch import watcher\n"
        "with watcher(Path(sys.argv[1])) as running:\n"
        "    running.begin(None, None, (), ())\n"
        "    print(running.process._process.pid, flush=True); time.sleep(60)"
    )
    import subprocess

    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    assert gone(pid)


def test_a_watcher_that_dies_is_said_once_and_the_night_goes_on(tmp_path):
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        made = Telemetry(tmp_path / "log", said.append, stack, Cores())
        assert made._ask(lambda running: running.gpus) is not None
        assert made._watcher is not None
        made._watcher.process._process.kill()
        made._watcher.process._process.wait()
        assert made.end().server == ()
        assert made.free(("GPU-a",)) == {}
    (line,) = said
    assert line.startswith("server, machine and GPUs are not watched from here on: the watcher")


def test_a_watcher_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("raise ImportError('planted')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ReferenceFailure, match="the watcher ended: ImportError: planted"):
        with watcher(tmp_path / "log"):
            pass
