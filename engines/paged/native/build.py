"""Compiles kernels.cpp once for its text, compiler and processor, and loads the result."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headway.engines.models import default_home

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = (SOURCE.with_name("tile.h"), SOURCE.with_name("attention.h"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
TIME_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Built:
    """The loaded library, or a sentence why there is none."""

    library: ctypes.CDLL | None
    reason: str | None = None


@cache
def load() -> Built:
    """Return the kernels, compiled now if they never were; raises nothing for want of a compiler.

    torch must have been imported: the library then shares the threads of torch's OpenMP, which is
    in memory under the same name.
    """
    return build(FLAGS)


def build(flags: tuple[str, ...]) -> Built:
    """Return the kernels as these flags make them, from $HEADWAY_HOME/native where they are kept.

    They are compiled beside their place and moved there whole: two processes at once do the work
    twice, and neither sees half a file.
    """
    if sys.platform != "linux":
        return Built(None, f"the native kernels are built on Linux only, not on {sys.platform}")
    compiler = _compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        return Built(None, f"no C++ compiler was found (looked for {wanted})")
    try:
        place = default_home() / "native" / f"kernels-{_key(compiler, flags)}.so"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, flags, place)
        return Built(ctypes.CDLL(str(place)))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return Built(
            None, f"{compiler[0]} could not compile the native kernels: {lines[-1].strip()}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Built(None, f"the native kernels could not be built or loaded: {error}")


def _compiler() -> list[str] | None:
    wanted = os.environ.get("CXX")
    names = [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]
    return next(([path, *more] for name, *more in names if (path := shutil.which(name))), None)


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    version = _run([*compiler, "--version"])
    texts = (file.read_text("utf-8") for file in (SOURCE, *HEADERS))
    parts = (*texts, version, " ".join(flags), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what -march=native looks at: a home may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _compile(compiler: list[str], flags: tuple[str, ...], place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=place.parent) as folder:
        made = Path(folder) / place.name
        _run([*compiler, *flags, str(SOURCE), "-o", str(made)])
        made.replace(place)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    return done.stdout
