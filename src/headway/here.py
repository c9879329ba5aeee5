"""What this machine is, as far as environments depend on it. Standard library only."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.installer import EnvironmentFailed


class NotHere(EnvironmentFailed):
    """An environment cannot be made on this machine, whatever one does."""


def variant_here() -> str:
    """`macos`, `linux_cuda` (an NVIDIA GPU is there) or `linux_cpu`: chooses the build of torch."""
    if sys.platform == "darwin":
        return "macos"
    # /dev/dxg is the GPU of Windows' Linux subsystem.
    gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    return "linux_cuda" if gpu else "linux_cpu"


def check_machine(name: str, machines: Sequence[str]) -> None:
    """Raise NotHere unless there are wheels for this machine; none named: for any."""
    here = f"{sys.platform}_{platform.machine()}"
    if machines and here not in machines:
        raise NotHere(
            f"The environment {name} has wheels for {' and '.join(machines)} only: this is {here}."
        )


def interpreter_for(name: str, pythons: Sequence[str]) -> tuple[Path, str]:
    """A Python that an environment works with, and its version: ours if it will do."""
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not pythons or ours in pythons:
        # Not a virtual environment's own Python: what it makes should outlive that environment.
        return Path(getattr(sys, "_base_executable", sys.executable)), ours
    for version in pythons:
        if found := shutil.which(f"python{version}"):
            return Path(found), version
    raise NotHere(
        f"The environment {name} needs Python {' or '.join(pythons)}: this "
        f"is {ours}, and no python{pythons[0]} is on the PATH."
    )
