"""Owns lock files: reading one, and having pip resolve a new one.

A lock file is a requirements file of `NAME==VERSION` pins, for the whole closure, that a person can
read. Pins after a line `# [VARIANT]` are for that variant only. It is installed without resolving
anything, and from wheels only, so that no package's own code runs and no compiler is needed.
"""

from __future__ import annotations

import datetime
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.installer import EnvironmentFailed, Write, run_pip

# The extra index may be out of reach without being needed, so it is not waited for long.
IMPATIENT = ("--retries", "2", "--timeout", "15")
NAME = re.compile(r"[A-Za-z0-9._-]+")
PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!_]+")


@dataclass(frozen=True, slots=True)
class CpuBuilds:
    """Which packages have a build without CUDA, called VERSION+cpu, and the index that has it."""

    packages: tuple[str, ...] = ()
    index: str = ""


@dataclass(frozen=True, slots=True)
class Lock:
    """What a lock file says for one variant: its pins, and about how many MB (10^6 bytes) they
    are to download, as measured when the file was written; None where it does not say."""

    pins: tuple[str, ...]
    download_mb: int | None


@dataclass(frozen=True, slots=True)
class _Wheel:
    name: str
    version: str
    num_bytes: int

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


def read_lock(path: Path, variant: str) -> Lock:
    """The pins for `variant`: those before any `# [VARIANT]`, and its own."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EnvironmentFailed(
            f"{path} cannot be read ({error.strerror}); "
            f"`headway env lock {path.stem}` in a checkout writes it."
        ) from error
    pins: list[str] = []
    section, download_mb = variant, None
    for number, line in enumerate(lines, start=1):
        pin = line.partition("#")[0].strip()
        if found := re.match(r"# \[(\w+)\]", line):
            section = found[1]
        elif found := re.match(rf"# download( {variant})?: (\d+) MB", line):
            download_mb = int(found[2])
        elif pin and not PIN.fullmatch(pin):
            raise EnvironmentFailed(f"{path}, line {number}: {pin!r} should be NAME==VERSION.")
        elif pin and section == variant:
            pins.append(pin)
    return Lock(tuple(pins), download_mb)


def write_lock(
    path: Path, about: str, requirements: Sequence[str], cpu: CpuBuilds, say: Write
) -> None:
    """Resolve `requirements` anew, with this Python's pip, and write the lock file.

    Downloads all of it once, to measure it; where there are CPU builds, also what the variant for
    a GPU has beyond that. The packages of `cpu` must be pinned in `requirements`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = _write(folder / "asked.txt", for_variant(requirements, cpu, "linux_cpu"))
        builds = [pin for pin in for_variant(requirements, cpu, "linux_cpu") if "+cpu" in pin]
        if builds:
            _download([*from_index(cpu), "--no-deps", *builds], folder / "common", say)
        local = ["--find-links", str(folder / "common")] if builds else []
        common = _download(["-r", asked, *local], folder / "common", say)
        cuda: dict[str, _Wheel] = {}
        if builds:
            asked = _write(folder / "asked.txt", for_variant(requirements, cpu, "linux_cuda"))
            same = _write(folder / "same.txt", [w.pin for w in common.values()])
            cuda = _download(["-r", asked, "-c", same], folder / "cuda", say)
    path.write_text(_lock_text(path.stem, about, common, cuda), encoding="utf-8")


def for_variant(pins: Sequence[str], cpu: CpuBuilds, variant: str) -> list[str]:
    """`pins` as pip must be asked for them, so that it takes the builds that `variant` is for.

    A configured folder or index may hold the CPU build, which pip would otherwise prefer for a GPU
    too: `===` is the version as written and nothing like it.
    """
    asked = {"linux_cpu": "{}=={}+cpu", "linux_cuda": "{}==={}"}.get(variant, "{}=={}")
    names = [pin.partition("==")[0] for pin in pins if PIN.fullmatch(pin)]
    if missing := sorted(set(cpu.packages).difference(names)):
        raise EnvironmentFailed(f"{missing[0]} has a CPU build and so must be pinned, with `==`.")
    return [
        asked.format(name, version) if name in cpu.packages else pin
        for pin in pins
        for name, _, version in [pin.partition("==")]
    ]


def from_index(cpu: CpuBuilds) -> list[str]:
    """pip's options to look at the index of the CPU builds as well, without waiting for it long."""
    return [*IMPATIENT, "--extra-index-url", cpu.index]


def _download(arguments: Sequence[str], folder: Path, say: Write) -> dict[str, _Wheel]:
    """Have pip resolve and download wheels into `folder`; return all that lie there, by name."""
    options = ["download", "--only-binary", ":all:", "--dest", str(folder)]
    run_pip(Path(sys.executable), [*options, *arguments], say)
    wheels = {}
    for path in folder.iterdir():
        name, version, *_ = path.name.split("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        wheels[name] = _Wheel(name, version.partition("+")[0], path.stat().st_size)
    return wheels


def _write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _lock_text(
    name: str, about: str, common: Mapping[str, _Wheel], cuda: Mapping[str, _Wheel]
) -> str:
    made = f"{datetime.date.today()}, Python {platform.python_version()}, {platform.machine()}"
    lines = [
        f"# {name}: {about}.",
        f"# Written by `headway env lock {name}` ({made}): not by hand.",
    ]
    lines.append(f"# download: {_total_mb(common)} MB")
    if cuda:
        lines.append(f"# download linux_cuda: {_total_mb(cuda)} MB")
    lines += ["", *_pin_lines(common)]
    if more := {name: wheel for name, wheel in cuda.items() if name not in common}:
        lines += [
            "",
            "# [linux_cuda] Linux with an NVIDIA GPU has these as well",
            *_pin_lines(more),
        ]
    return "\n".join(lines) + "\n"


def _pin_lines(wheels: Mapping[str, _Wheel]) -> list[str]:
    lines = []
    for _, wheel in sorted(wheels.items()):
        mb = wheel.num_bytes / 1e6
        lines.append(wheel.pin + (f"  # {mb:.1f} MB" if mb >= 2 else ""))
    return lines


def _total_mb(wheels: Mapping[str, _Wheel]) -> int:
    return round(sum(wheel.num_bytes for wheel in wheels.values()) / 1e6)
