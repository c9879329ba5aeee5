"""What may be compared with what: identity, environment, treatment.

Identity must match, or two results are INCOMPATIBLE. Environment opens a new epoch when it
changes. Treatment is the subject of a comparison: it never blocks and is always printed. Nothing
that was measured is ever part of any of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.core import Case, EngineInfo


@dataclass(frozen=True, slots=True)
class Machine:
    """The device under test and what surrounds it; no host name, no user name.

    `gpu_uuid` is the one GPU of its kind: another card of the same model is another environment.
    """

    device: str
    cpu: str
    num_cpus: int
    memory_bytes: int
    os: str
    gpu_driver: str | None = None
    container: bool = False
    gpu_uuid: str | None = None

    def environment(self) -> dict[str, str]:
        """Return the facts whose change opens a new epoch."""
        card = {} if self.gpu_uuid is None else {"gpu": self.gpu_uuid}
        return card | {
            "cpu": self.cpu,
            "num_cpus": str(self.num_cpus),
            "os": self.os,
            "gpu_driver": self.gpu_driver or "none",
            "container": str(self.container),
        }


@dataclass(frozen=True, slots=True)
class Treatment:
    """What was put under test: it may differ, and is shown as what changed."""

    kind: str
    version: str
    args: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None


def identity(
    case: Case, revision: str, dtype: str, workload: str, device: str, metric_version: int
) -> dict[str, str]:
    """Return the facts that two results must share to be compared."""
    return {
        "instance": case.instance,
        "model": case.model,
        "revision": revision,
        "dtype": dtype,
        "workload": workload,
        "level": case.level,
        "device": device,
        "metric_version": str(metric_version),
    }


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return `key: old → new` for each key that differs, in order of the keys."""
    keys = sorted({*old, *new})
    return [
        f"{key}: {old.get(key, 'absent')} → {new.get(key, 'absent')}"
        for key in keys
        if old.get(key) != new.get(key)
    ]


def treatment(
    info: EngineInfo,
    args: Mapping[str, object],
    env: Mapping[str, str],
    commit: str | None = None,
) -> Treatment:
    """Return the treatment of an instance, from its running engine and the suite."""
    return Treatment(info.kind, info.version, args, env, info.settings, info.versions, commit)


def short_hash(text: str) -> str:
    """Return 12 hex digits that name a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def slug(text: str) -> str:
    """Return a text as a file name: letters, digits, `_`, `.` and `-`; long ones end in a hash.

    At most 100 bytes, so that a name made of two stays within what file systems allow.
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_.") or "x"
    if safe != text or len(safe) > 100:
        safe = f"{safe[:80]}_{short_hash(text)[:8]}"
    return safe


def read_machine(device: str) -> Machine:
    """Read this machine. `device` is `cpu` or `cuda`; raises ValueError for a GPU not there."""
    cpu = _cpu_model()
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu, driver, uuid = _gpu() if device == "cuda" else (None, None, None)
    if device == "cuda" and gpu is None:
        raise ValueError("device is cuda, but nvidia-smi finds no GPU; use --headway-device cpu")
    return Machine(
        device=gpu or f"{cpu} x{num_cpus}",
        cpu=cpu,
        num_cpus=num_cpus or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        gpu_driver=driver,
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        gpu_uuid=uuid,
    )


def find_device(wanted: str) -> str:
    """Resolve `auto` to `cuda` where a GPU answers, else `cpu`."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--headway-device is {wanted!r}; allowed: auto, cpu, cuda")
    if wanted != "auto":
        return wanted
    return "cuda" if _gpu()[0] is not None else "cpu"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _gpu() -> tuple[str | None, str | None, str | None]:
    """Return name, driver and UUID of the first GPU that this process may see."""
    nobody = (None, None, None)
    if shutil.which("nvidia-smi") is None:
        return nobody
    command = ["nvidia-smi", "--query-gpu=name,driver_version,uuid", "--format=csv,noheader"]
    # An engine's first GPU is the first one that this process may see.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    command += [f"--id={visible}"] if visible else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return nobody
    line = answer.stdout.strip().splitlines()[:1]
    if answer.returncode != 0 or not line:
        return nobody
    name, _, rest = line[0].partition(",")
    driver, _, uuid = rest.partition(",")
    return name.strip(), driver.strip(), uuid.strip() or None
