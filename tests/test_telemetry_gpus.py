"""GPUs by a planted NVML: what they say, what slowed them down, who else was on them, energy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.telemetry import Reading, Watched, chosen, figures, series, wait_free
from headway.telemetry.figures import energy_j, foreign
from headway.telemetry.free import TOLERANCE_BYTES
from headway.telemetry.gpus import REASONS, opened, read

GIB = 1 << 30
A, B = "GPU-aaaa", "GPU-bbbb"


class NVMLError(Exception):
    """As pynvml names it."""


class Nvml:
    """A planted driver: what a card lacks raises, as NVML_ERROR_NOT_SUPPORTED does."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, cards: dict[str, dict] | None) -> None:
        self.cards = cards

    def nvmlInit(self):  # noqa: N802 - as pynvml names it
        if self.cards is None:
            raise NVMLError("Shared Library Not Found")

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.cards[list(self.cards)[index]]

    def nvmlDeviceGetUUID(self, card):  # noqa: N802
        return next(uuid for uuid, one in self.cards.items() if one is card)

    def __getattr__(self, name):
        keys = {
            "nvmlDeviceGetPowerUsage": "milliwatts",
            "nvmlDeviceGetTotalEnergyConsumption": "millijoules",
            "nvmlDeviceGetClockInfo": "mhz",
            "nvmlDeviceGetTemperature": "celsius",
            "nvmlDeviceGetMemoryInfo": "memory",
            "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
            "nvmlDeviceGetComputeRunningProcesses": "compute",
            "nvmlDeviceGetGraphicsRunningProcesses": "graphics",
        }

        def ask(card, *_):
            if keys[name] not in card:
                raise NVMLError("Not Supported")
            return card[keys[name]]

        return ask


def process(pid: int, held: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=held)


FULL = {
    "milliwatts": 412_000,
    "millijoules": 5_000_000,
    "mhz": 1980,
    "celsius": 61,
    "memory": SimpleNamespace(used=70 * GIB),
    "reasons": 0x4,
    "compute": [process(7, 60 * GIB), process(8, None)],
    "graphics": [process(9, GIB)],
}


def test_a_card_says_what_it_knows_in_our_units():
    nvml = Nvml({A: FULL})
    one = read(nvml, opened(nvml)[A])
    assert one.values == {
        "power": 412.0,
        "energy": 5000.0,
        "sm_clock": 1.98e9,
        "memory_clock": 1.98e9,
        "temperature": 61.0,
        "memory": 70 * GIB,
        "reasons": 4.0,
    }
    assert one.processes == {"7": 60 * GIB, "8": 0, "9": GIB}


@pytest.mark.parametrize("missing", sorted(FULL))
def test_what_a_card_does_not_support_is_left_out_and_the_rest_stays(missing):
    card = {key: value for key, value in FULL.items() if key != missing}
    nvml = Nvml({A: card})
    one = read(nvml, opened(nvml)[A])
    assert one.values is not None
    assert len(one.values) >= 5
    assert (one.processes is None) == (missing == "compute")


def test_a_card_that_says_nothing_is_a_gap_and_a_machine_without_a_driver_has_no_card():
    nvml = Nvml({A: {}})
    assert read(nvml, opened(nvml)[A]).values is None
    assert opened(Nvml(None)) == {}


def test_the_bits_are_nvml_s_own():
    pynvml = pytest.importorskip("pynvml")
    names = {
        "sw_power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown",
        "sync_boost": "SyncBoost",
        "sw_thermal": "SwThermalSlowdown",
        "hw_thermal": "HwThermalSlowdown",
        "power_brake": "HwPowerBrakeSlowdown",
    }
    assert {
        getattr(pynvml, f"nvmlClocksEventReason{names[ours]}"): ours for ours in names
    } == REASONS
    assert issubclass(pynvml.NVMLError, Exception)


def test_cards_are_chosen_by_number_or_uuid_and_known_by_uuid():
    assert chosen((), (A, B)) == (A, B)
    assert chosen(("1",), (A, B)) == (B,)
    assert chosen((B, "0"), (A, B)) == (B, A)
    assert chosen(("GPU-b",), (A, B)) == (B,)
    for wrong in ("2", "GPU-", "GPU-c"):
        with pytest.raises(ValueError, match=f"gpus names '{wrong}', which is not one GPU"):
            chosen((wrong,), (A, B))


def card(*said: dict[str, float] | None, processes=None) -> tuple[Reading, ...]:
    """Readings half a second apart, the first half a second before a Run at 100."""
    return tuple(Reading(99.5 + k / 2, one, processes) for k, one in enumerate(said))


RESTING = {A: Reading(90.0, {"memory": 2.0 * GIB}, {"5": GIB})}


def test_throttling_is_told_with_its_reason_and_its_length_within_the_run():
    bits = (0x40, 0x40, 0x48, 0x0, 0x4, 0x4, 0x40)  # the first and the last lie outside
    gpus = {A: card(*({"reasons": bit} for bit in bits))}
    said = figures(Watched(gpus=gpus), 100.0, 2.0)
    assert said["gpu_hw_thermal_s"] == pytest.approx(1.0)
    assert said["gpu_hw_slowdown_s"] == pytest.approx(0.5)
    assert said["gpu_sw_power_cap_s"] == pytest.approx(0.5)
    assert "gpu_power_brake_s" not in said


@pytest.mark.parametrize("bits", [0x0, 0x1, 0x2, 0x100, 0x103])
def test_idle_and_clocks_that_somebody_set_are_no_throttling(bits):
    gpus = {A: card(*({"reasons": float(bits)} for _ in range(6)))}
    assert not [name for name in figures(Watched(gpus=gpus), 100.0, 2.0) if name.endswith("_s")]


def test_energy_is_by_the_counter_between_the_ends_of_the_run():
    # 400 W all along; the Run is from 100 to 102, readings lie around it.
    readings = card(*({"energy": 7000.0 + 200.0 * k, "power": 1.0} for k in range(7)))
    assert energy_j(readings, 100.0, 102.0) == pytest.approx(800.0)
    assert energy_j(readings, 100.1, 101.7) == pytest.approx(640.0)
    said = figures(Watched(gpus={A: readings, B: readings}), 100.0, 2.0)
    assert said["gpu_energy_j"] == pytest.approx(1600.0)
    assert said["gpu_power_w"] == pytest.approx(800.0)


def test_without_a_counter_power_is_integrated_and_without_both_there_is_none():
    readings = card(*({"power": 100.0 * k} for k in range(7)))
    # From 100 (100 W) to 102 (500 W) in a straight line.
    assert energy_j(readings, 100.0, 102.0) == pytest.approx(600.0)
    assert energy_j(card(*({"memory": 1.0} for _ in range(7))), 100.0, 102.0) is None
    # A driver that stopped answering before the Run's end.
    assert energy_j(readings[:3], 100.0, 102.0) is None
    both = {A: readings, B: card(*({"memory": 1.0} for _ in range(7)))}
    assert "gpu_energy_j" not in figures(Watched(gpus=both), 100.0, 2.0)


@given(
    st.lists(st.floats(0, 1000), min_size=7, max_size=7),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_constant_power_gives_the_same_energy_either_way(watts, early, long):
    counted, total = [], 0.0
    for watt in watts:
        counted.append({"energy": total})
        total += watt / 2
    start_s, end_s = 100 + early, 100 + early + long
    whole = energy_j(card(*counted), start_s, end_s)
    assert whole is not None
    assert -1e-6 <= whole <= total + 1e-6
    steady = card(*({"power": watts[0]} for _ in watts))
    assert energy_j(steady, start_s, end_s) == pytest.approx(watts[0] * (end_s - start_s))


def test_gpu_memory_is_what_is_used_beside_what_rested_there():
    gpus = {A: card({"memory": 60.0 * GIB}, {"memory": 62.0 * GIB}, None, {"memory": 61.0 * GIB})}
    assert figures(Watched(gpus=gpus), 100.0, 1.0, RESTING)["gpu_memory_peak_bytes"] == 60 * GIB
    assert "gpu_memory_peak_bytes" not in figures(Watched(gpus=gpus), 100.0, 1.0, {})


@pytest.mark.parametrize(
    ("before", "during", "ours", "strangers"),
    [
        ({}, [{"10": 60 * GIB}] * 3, {"10", "11"}, {}),
        ({"5": GIB}, [{"5": GIB, "10": 60 * GIB}] * 3, {"10"}, {}),  # an idle resident
        ({}, [{"10": GIB}, {"10": GIB, "66": 3 * GIB}, {"10": GIB}], {"10"}, {"66": 3 * GIB}),
        ({}, [{"10": GIB, "66": 3 * GIB}] * 3, {"10"}, {"66": 3 * GIB}),  # since before the Run
        ({"5": GIB}, [{"5": GIB}, {"5": 9 * GIB}], {"10"}, {"5": 8 * GIB}),  # a resident at work
        # In a container nobody knows the numbers: what came before the Run is the engine's.
        ({"5": GIB}, [{"5": GIB, "71": 60 * GIB}] * 3, set(), {}),
        ({"5": GIB}, [{"71": GIB}, {"71": GIB, "72": GIB}], set(), {"72": GIB}),
    ],
)
def test_foreign_is_who_was_not_there_before_and_is_not_ours(before, during, ours, strangers):
    assert foreign(before, during, ours) == strangers


def test_foreign_work_is_counted_where_the_driver_names_processes_and_unknown_elsewhere():
    there = {A: card({"memory": 1.0}, {"memory": 1.0}, processes={"5": GIB, "66": 3 * GIB})}
    said = figures(Watched(gpus=there), 100.0, 1.0, RESTING, [10])
    assert said["gpu_foreign_processes"] == 1
    assert said["gpu_foreign_bytes"] == 3 * GIB
    silent = {A: card({"memory": 1.0}, {"memory": 1.0})}
    assert "gpu_foreign_processes" not in figures(Watched(gpus=silent), 100.0, 1.0, RESTING, [10])


def test_each_of_several_cards_has_series_of_its_own():
    one, two = card({"power": 1.0}), card({"power": 2.0})
    assert [s.name for s in series(Watched(gpus={A: one}), 100.0)] == ["power"]
    found = series(Watched(gpus={A: one, B: two}), 100.0)
    assert [(s.name, s.values) for s in found] == [("power_0", (1.0,)), ("power_1", (2.0,))]


class Polls:
    """A probe that answers in order, then the last for ever; time passes while one sleeps."""

    def __init__(self, *gib: float) -> None:
        self.left = list(gib)
        self.asked = 0
        self.now_s = 0.0

    def look(self) -> dict[str, float]:
        self.asked += 1
        used = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {A: used * GIB}

    def wait(self, resting_gib: float) -> str | None:
        return wait_free(
            self.look,
            {A: resting_gib * GIB},
            60.0,
            clock=lambda: self.now_s,
            sleep=lambda seconds: setattr(self, "now_s", self.now_s + seconds),
        )


def test_case_32_the_next_engine_waits_for_the_memory_of_the_last():
    polls = Polls(70, 70, 40, 2)
    assert polls.wait(resting_gib=2) is None
    assert polls.asked == 4


def test_case_32_memory_that_stays_is_said_after_the_limit():
    polls = Polls(70)
    said = polls.wait(resting_gib=2)
    assert said == (
        f"GPU {A} still used 70.0 GiB after 60 s; it used 2.0 GiB before the engine before this one"
    )
    assert 60 <= polls.now_s < 62


def test_a_little_more_than_before_is_free_and_so_is_what_nobody_knows():
    within = 2 + TOLERANCE_BYTES / GIB
    assert Polls(within).wait(resting_gib=2) is None
    assert wait_free(dict, {A: 2.0}, 0.0) is None
    assert wait_free(lambda: {A: 70.0 * GIB}, {}, 0.0) is None
