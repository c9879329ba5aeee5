"""Nights on a planted GPU: memory that comes back or does not, foreign work, energy, throttling."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import night, suite, telemetry, verdict
from headway.core import LaunchRecord, Run
from headway.fingerprint import Machine
from headway.night import Night, real, running, watch
from headway.report.document import document
from headway.report.markdown import markdown
from headway.report.terminal import terminal

GIB = 1 << 30
UUID = "GPU-0123"
PYNVML = """
import json, os, time
class NVMLError(Exception): pass
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
def _card(): return json.load(open(os.environ["PLANTED_CARD"]))
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(card): return "GPU-0123"
def _missing(*_): raise NVMLError("Not Supported")
nvmlDeviceGetClockInfo = nvmlDeviceGetTemperature = _missing
nvmlDeviceGetGraphicsRunningProcesses = _missing
def nvmlDeviceGetPowerUsage(card): return 200_000
def nvmlDeviceGetTotalEnergyConsumption(card): return time.monotonic() * 200_000
def nvmlDeviceGetCurrentClocksEventReasons(card): return _card()["reasons"]
class _Of:
    def __init__(self, **named): self.__dict__.update(named)
def nvmlDeviceGetMemoryInfo(card): return _Of(used=_card()["used"])
def nvmlDeviceGetComputeRunningProcesses(card):
    return [_Of(pid=int(pid), usedGpuMemory=held) for pid, held in _card()["processes"].items()]
"""
SUITE = """
[suite]
model = "fake"
launches = 1
idle_timeout_s = 5
calibrate = false
{engines}
[workload.w]
prompt_tokens = 8
output_tokens = 10
concurrency = [2]
requests = 8
[baseline]
metrics = []
"""
ENGINE = """
[engine.{name}]
kind = "fake"
gpus = [0]
args = {{ ttft_s = 0.02, itl_s = 0.02 }}
"""
Begin = Callable[..., Night]


class Card:
    """The planted card: what it says from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: dict[str, Any] = {"used": 2 * GIB, "processes": {"5": GIB}, "reasons": 0}
        self.say()

    def say(self, **changes: Any) -> None:
        self.said |= changes
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.said))
        fresh.replace(self.path)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", str(driver))
    monkeypatch.setenv("PLANTED_CARD", str(tmp_path / "card.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Card(tmp_path / "card.json")


@pytest.fixture
def begin(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch, night_of: Callable[..., Night]
) -> Begin:
    """Begin a night on that card; `alive` is called when the first engine serves, `ended` after."""
    path = tmp_path / "tiny.toml"
    count = iter(range(100))

    def make(
        *engines: str,
        alive: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> Night:
        tables = "".join(ENGINE.format(name=name) for name in engines)
        path.write_text(SUITE.format(engines=tables))
        launched = real.launched

        @contextlib.contextmanager
        def planted(spec: Any) -> Iterator[Any]:
            first = next(count) == 0
            with launched(spec) as endpoint:
                card.say(used=62 * GIB)
                if first:
                    alive()
                yield endpoint
            card.say(used=2 * GIB)
            if first:
                ended()

        monkeypatch.setattr(real, "launched", planted)
        limited = functools.partial(telemetry.wait_free, limit_s=2.0)
        monkeypatch.setattr(watch, "wait_free", limited)
        machine = Machine("Planted 80", "cpu", 2, 8 * GIB, "Linux", "999", gpu_uuid=UUID)
        made = night_of(suite.load(path, ()), device="cuda", machine=machine)
        made.expect(made.suite.cases())
        night.measure_all(made, made.cases)
        return made

    return make


def records(made: Night) -> list[LaunchRecord]:
    """The launches, in the order in which they were made."""
    return list(made.results.launches)


def about_the_gpu(run: Run) -> list[str]:
    """Why a Run is invalid, but for what a busy machine does to its client."""
    return [reason for reason in run.invalid if "GPU" in reason]


def verdicts(made: Night) -> dict[str, set[str]]:
    cells = verdict.judge(made.results, verdict.Memory())
    found: dict[str, set[str]] = {}
    for cell in cells:
        found.setdefault(cell.case.instance, set()).add(cell.verdict)
    return found


def test_case_32_the_next_engine_waits_until_memory_is_given_back(begin: Begin, card: Card) -> None:
    """70, 70, 40, then 2 GiB, while the second engine is to start."""

    def ended() -> None:
        card.say(used=70 * GIB)
        for seconds, gib in ((0.4, 40), (0.9, 2)):
            threading.Timer(seconds, lambda gib=gib: card.say(used=gib * GIB)).start()

    made = begin("one", "two", ended=ended)
    assert [record.failure_kind for record in records(made)] == [None, None]
    assert all(record.gpus == (UUID,) for record in records(made))
    assert not any(about_the_gpu(run) for run in made.results.runs)


def test_case_32_memory_that_stays_costs_the_next_engine_only(begin: Begin, card: Card) -> None:
    made = begin("one", "two", "three", ended=lambda: card.say(used=70 * GIB))
    first, second, third = records(made)
    assert [r.failure_kind for r in (first, second, third)] == [None, "gpu_not_free", None]
    assert second.failure is not None
    assert "still used 70.0 GiB after 2 s; it used 2.0 GiB before" in second.failure
    said = verdicts(made)
    assert said[second.instance] == {"INVALID"}  # no fault of the engine's, no regression
    assert "INVALID" not in said[first.instance] | said[third.instance]
    assert {run.case.instance for run in made.results.runs} == {first.instance, third.instance}


def test_energy_and_memory_of_the_card_are_cells_and_lines_of_the_report(begin: Begin) -> None:
    made = begin("one")
    run = made.results.runs[0]
    assert run.engine["gpu_energy_j"] == pytest.approx(200 * run.span_s, rel=0.01)
    assert run.engine["gpu_memory_peak_bytes"] == 60 * GIB
    cells = {
        (cell.case.instance, cell.metric): cell
        for cell in verdict.judge(made.results, verdict.Memory())
    }
    tokens = 8 * 10
    energy = cells["one", "energy_per_token"]
    assert energy.value is not None
    assert energy.value == pytest.approx(200 * made.results.runs[0].span_s / tokens, rel=0.2)
    assert cells["one", "gpu_memory"].value == 60 * GIB
    shown = document(made.results, list(cells.values()), headway_version="1")
    assert "GPU 200 W" in terminal(shown, 120, color=False)
    assert "J/token, 60.0 GiB of GPU memory" in markdown(shown)
    assert shown["machine"]["gpu_uuid"] == UUID
    names = {one["name"] for one in shown["cases"][0]["runs"][0]["series"]}
    assert {"power", "energy", "memory", "running"} <= names


def test_throttling_while_a_run_lasts_makes_it_invalid(begin: Begin, card: Card) -> None:
    made = begin(
        "one", alive=lambda: card.say(reasons=0x20 | 0x4), ended=lambda: card.say(reasons=0x4)
    )
    first, second, *_ = made.results.runs  # which takes its place
    (said,) = about_the_gpu(first)
    assert said.startswith("the GPU was slowed down by its driver for heat for ")
    assert not about_the_gpu(second)
    assert second.engine["gpu_sw_power_cap_s"] > 0


def test_a_stranger_on_the_card_makes_it_invalid_and_an_idle_resident_does_not(
    begin: Begin, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "our_processes", lambda: [10])
    made = begin(
        "one",
        alive=lambda: card.say(processes={"5": GIB, "10": 60 * GIB, "66": 3 * GIB}),
        ended=lambda: card.say(processes={"5": GIB}),
    )
    first, second, *_ = made.results.runs
    assert about_the_gpu(first) == [
        "1 process that is not ours worked on the GPU, with 3.0 GiB of its memory"
    ]
    assert not about_the_gpu(second)
