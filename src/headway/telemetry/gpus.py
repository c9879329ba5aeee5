"""GPUs through NVML (nvidia-ml-py): which there are, and what each says of itself.

What a driver or a card does not know is left out, never 0. `nvml` is the module `pynvml`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.telemetry.readings import Processes, Reading

# Why clocks are lower than they could be, by the bits that NVML sets (nvml.h). The others are no
# throttling: 0x1 idle, 0x2 and 0x100 clocks as somebody set them.
REASONS: Mapping[int, str] = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


def opened(nvml: Any) -> dict[str, Any]:
    """Return the handles of the GPUs by UUID, as nvidia-smi counts them; none without a driver."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return {}
    found = {}
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found[_text(nvml.nvmlDeviceGetUUID(handle))] = handle
        except nvml.NVMLError:
            continue  # one that has fallen off the bus is not there
    return found


def chosen(named: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the UUIDs of GPUs named by number or UUID, or its beginning; none: all.

    Raises ValueError for one that is not there.
    """
    if not named:
        return tuple(known)
    found = []
    for name in named:
        if name.isdecimal():
            matching = [known[int(name)]] if int(name) < len(known) else []
        else:
            matching = [uuid for uuid in known if uuid.startswith(name)]
        if len(matching) != 1:
            there = ", ".join(known) or "none"
            raise ValueError(f"gpus names {name!r}, which is not one GPU of this machine: {there}")
        found += matching
    return tuple(dict.fromkeys(found))


def read(nvml: Any, handle: Any) -> Reading:
    """Read one GPU: W, J, Hz, degrees Celsius, bytes, and the bits of `REASONS`."""
    asks: dict[str, Callable[[], float]] = {
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "energy": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        "sm_clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        "memory_clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    }
    values = {}
    for name, ask in asks.items():
        try:
            values[name] = float(ask())
        except nvml.NVMLError:
            continue
    return Reading(time.monotonic(), values or None, _processes(nvml, handle))


def _processes(nvml: Any, handle: Any) -> Processes | None:
    """Return who holds memory; None where it is not told who computes."""
    try:
        listed = list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return None
    with contextlib.suppress(nvml.NVMLError):
        listed += nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    found: dict[str, int] = {}
    for one in listed:
        found[str(one.pid)] = max(found.get(str(one.pid), 0), one.usedGpuMemory or 0)
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
