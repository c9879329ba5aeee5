"""Owns lock files: reading one, and having pip resolve a new one.

A lock file is a requirements file of `NAME==VERSION` pins, for the whole closure, that a person can
read. Lines after `# [VARIANT]` are for that variant only, here and in the requirements that it is
resolved from. It is installed without resolving anything, and from wheels only, so that no
package's own code runs and no compiler is needed.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.installer import EnvironmentFailed, Write, run_pip

# The extra index may be out of reach without being needed, so it is not waited for long.
IMPATIENT = ("--retries", "2", "--timeout", "15")
SIZE_TIMEOUT_S = 30.0
VARIANTS = {
    "linux_cpu": "Linux without an NVIDIA GPU has these as well",
    "linux_cuda": "Linux with an NVIDIA GPU has these as well",
}
NAME = re.compile(r"[A-Za-z0-9._-]+")
PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!_]+")


@dataclass(frozen=True, slots=True)
class CpuBuilds:
    """Which packages have a build without CUDA, called VERSION+cpu, and the index that has it.

    What is in `leave_out` has none there, and nothing that we need: it is not installed.
    """

    packages: tuple[str, ...] = ()
    index: str = ""
    leave_out: tuple[str, ...] = ()


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
    download_mb = None
    for number, line in lines_for(lines, variant):
        pin = line.partition("#")[0].strip()
        if found := re.match(rf"# download( {variant})?: (\d+) MB", line):
            download_mb = int(found[2])
        elif pin and not PIN.fullmatch(pin):
            raise EnvironmentFailed(f"{path}, line {number}: {pin!r} should be NAME==VERSION.")
        elif pin:
            pins.append(pin)
    return Lock(tuple(pins), download_mb)


def lines_for(lines: Sequence[str], variant: str) -> Iterator[tuple[int, str]]:
    """The lines that are for `variant`, with their numbers."""
    section = variant
    for number, line in enumerate(lines, start=1):
        if found := re.match(r"# \[(\w+)\]", line):
            section = found[1]
        elif section == variant:
            yield number, line


def write_lock(
    path: Path, about: str, requirements: Mapping[str, Sequence[str]], cpu: CpuBuilds, say: Write
) -> None:
    """Resolve `requirements` (of each of VARIANTS) anew, with this Python's pip, and write the lock
    file. Where there are no CPU builds there is one variant, since all are the same.

    Downloads the CPU builds; of the rest, pip 24 or later reads the metadata only. The packages of
    `cpu` must be pinned in `requirements`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        builds = [
            pin for pin in for_variant(requirements["linux_cpu"], cpu, "linux_cpu") if "+cpu" in pin
        ]
        if builds:
            options = ["--only-binary", ":all:", "--no-deps", "--dest", str(folder), *builds]
            run_pip(Path(sys.executable), ["download", *from_index(cpu), *options], say)
        variants = list(VARIANTS) if builds else ["linux_cpu"]
        wheels = {
            variant: _resolve(for_variant(requirements[variant], cpu, variant), folder, say)
            for variant in variants
        }
    for name in cpu.leave_out:
        wheels["linux_cpu"].pop(name, None)
    path.write_text(_lock_text(path.stem, about, wheels), encoding="utf-8")


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


def _resolve(asked: Sequence[str], folder: Path, say: Write) -> dict[str, _Wheel]:
    """Have pip choose wheels for what is asked and all that it needs, by name; some lie in
    `folder`."""
    listed, report = folder / "asked.txt", folder / "report.json"
    listed.write_text("\n".join(asked) + "\n", encoding="utf-8")
    options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    options += ["--use-feature=fast-deps", "--find-links", str(folder), "--report", str(report)]
    run_pip(Path(sys.executable), ["install", *options, "-r", str(listed)], say)
    wheels = {}
    for chosen in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = re.sub(r"[-_.]+", "-", chosen["metadata"]["name"]).lower()
        version = chosen["metadata"]["version"].partition("+")[0]
        wheels[name] = _Wheel(name, version, _num_bytes(chosen["download_info"]["url"]))
    return wheels


def _num_bytes(url: str) -> int:
    """How large the wheel at `url` is."""
    split = urllib.parse.urlsplit(url)
    if split.scheme == "file":
        return Path(urllib.request.url2pathname(split.path)).stat().st_size
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=SIZE_TIMEOUT_S) as answer:
            return int(answer.headers["Content-Length"])
    except (urllib.error.URLError, TypeError, ValueError) as error:
        raise EnvironmentFailed(f"{url} does not say how large it is: {error}.") from error


def _lock_text(name: str, about: str, wheels: Mapping[str, Mapping[str, _Wheel]]) -> str:
    made = f"{datetime.date.today()}, Python {platform.python_version()}, {platform.machine()}"
    lines = [
        f"# {name}: {about}.",
        f"# Written by `headway env lock {name}` ({made}): not by hand.",
    ]
    pins = [{wheel.pin for wheel in of.values()} for of in wheels.values()]
    common = set.intersection(*pins)
    for variant, of in wheels.items():
        label = "" if variant == "linux_cpu" else f" {variant}"
        lines.append(f"# download{label}: {_total_mb(of)} MB")
    lines += ["", *_pin_lines(wheels["linux_cpu"], common)]
    for variant, of in wheels.items():
        if own := {wheel.pin for wheel in of.values()} - common:
            lines += ["", f"# [{variant}] {VARIANTS[variant]}", *_pin_lines(of, own)]
    return "\n".join(lines) + "\n"


def _pin_lines(wheels: Mapping[str, _Wheel], pins: set[str]) -> list[str]:
    lines = []
    for _, wheel in sorted(wheels.items()):
        if wheel.pin in pins:
            mb = wheel.num_bytes / 1e6
            lines.append(wheel.pin + (f"  # {mb:.1f} MB" if mb >= 2 else ""))
    return lines


def _total_mb(wheels: Mapping[str, _Wheel]) -> int:
    return round(sum(wheel.num_bytes for wheel in wheels.values()) / 1e6)
