"""Owns the Python environments that engines run in: which there are, making, removing, locking.

What there is to know about an environment is data, in `engines/envs`: `environments.toml` and a
lock file each. An environment lies under Headway's home in a folder named after everything that
went into it, so that a changed lock or another Python is another folder. Only the standard library
is needed, and any Python that can run Headway: `make setup` runs this before anything is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path

from headway.compiling import Recipe, check_compiler, compile_into, processor, read_recipe
from headway.engines.models import default_home
from headway.here import NotHere, check_machine, interpreter_for, variant_here
from headway.installer import EnvironmentFailed, Write, build, delete, is_made, locked, made_bytes
from headway.lockfile import (
    VARIANTS,
    CpuBuilds,
    Lock,
    for_variant,
    from_index,
    lines_for,
    read_lock,
    write_lock,
)

__all__ = ["EnvironmentFailed", "NotHere", "default_home", "main", "python_for"]

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent.parent
IN_CHECKOUT = (CHECKOUT / "engines" / "envs").is_dir() and (CHECKOUT / "pyproject.toml").is_file()
ENVS = (CHECKOUT if IN_CHECKOUT else PACKAGE) / "engines" / "envs"
# The oldest Python supported, because newer releases of what is locked may have left it behind.
LOCKED_WITH = (3, 11)


@dataclass(frozen=True, slots=True)
class Environment:
    """One entry of `environments.toml`, whose header explains the fields."""

    name: str
    about: str
    engines: tuple[str, ...]
    input: str
    own: bool = False
    pythons: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    cpu: CpuBuilds = field(default_factory=CpuBuilds)
    compiled: Recipe | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """An environment as it would be made here: from what, with which Python, where."""

    environment: Environment
    lock: Lock
    variant: str
    interpreter: Path
    folder: Path
    key: str
    editable: Path | None = None

    @property
    def python(self) -> Path:
        """The Python in it, made or not."""
        return self.folder / "bin" / "python"

    @property
    def download_mb(self) -> int | None:
        """About how many MB there are to download; None where the lock does not say."""
        compiled, of_lock = self.environment.compiled, self.lock.download_mb
        return of_lock if of_lock is None or compiled is None else of_lock + compiled.download_mb

    @property
    def made(self) -> bool:
        """Whether it is there, whole and up to date."""
        return is_made(self.folder, self.key)


def environments() -> dict[str, Environment]:
    """All environments by name."""
    path = ENVS / "environments.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentFailed(f"{path} cannot be read: {error.strerror}.") from error
    return {name: _environment(name, table) for name, table in tables.items()}


def environment_of(engine: str) -> Environment:
    """The environment that engines of kind `engine` run in."""
    known = environments().values()
    for environment in known:
        if engine in environment.engines:
            return environment
    kinds = ", ".join(sorted(kind for environment in known for kind in environment.engines))
    raise EnvironmentFailed(
        f"No environment is known for engines of kind {engine!r}; there is one for: {kinds}."
    )


def kinds() -> list[str]:
    """Every kind of engine that there is an environment for, the reference left out."""
    named = {kind for environment in environments().values() for kind in environment.engines}
    return sorted(named - {"reference"})


def python_for(kind: str, home: Path | None = None, say: Write | None = None) -> Path:
    """The Python in which engines of kind `kind` run; makes its environment if need be.

    `say` (None: stderr) is told what will be downloaded, how much and where to, before anything
    is. Raises EnvironmentFailed. When all is there, this takes milliseconds and runs nothing.
    """
    environment = environment_of(kind)
    if environment.own:
        return Path(sys.executable)
    home = home or default_home()
    planned = plan(environment, home)
    make([planned], home, say or sys.stderr.write)
    return planned.python


def plan(environment: Environment, home: Path, variant: str | None = None) -> Plan:
    """How `environment` would be made here; `variant` None means what this machine needs."""
    variant = variant or variant_here()
    check_machine(environment.name, environment.machines)
    interpreter, version = interpreter_for(environment.name, environment.pythons)
    lock = read_lock(_lock_path(environment), variant)
    recipe = environment.compiled
    native = () if recipe is None else (astuple(recipe), processor())
    left_out = environment.cpu.leave_out
    key = _key(lock.pins, left_out, version, variant, platform.machine(), *native)
    folder = home / "envs" / f"{environment.name}-{key[:10]}"
    return Plan(environment, lock, variant, interpreter, folder, key)


def plan_checkout() -> Plan:
    """The environment of this checkout, `.venv`, with Headway itself installed editable."""
    if not IN_CHECKOUT:
        raise EnvironmentFailed(
            f"{PACKAGE} is an installed Headway, not a checkout: there is nothing to set up."
        )
    environment = environments()["headway"]
    interpreter, version = interpreter_for(environment.name, environment.pythons)
    lock = read_lock(_lock_path(environment), variant_here())
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    # What an editable install depends on; the settings of ruff or mypy are no reason for a new one.
    installed = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    key = _key(lock.pins, version, platform.machine(), str(CHECKOUT), installed)
    return Plan(environment, lock, "", interpreter, CHECKOUT / ".venv", key, CHECKOUT)


def make(plans: Iterable[Plan], home: Path, say: Write) -> None:
    """Make what of `plans` is not there yet, saying first what that takes. Safe to run twice at
    once: the second waits, and finds it made. Raises EnvironmentFailed."""
    missing = [planned for planned in plans if not planned.made]
    if not missing:
        return
    check_compiler([p.environment.name for p in missing if p.environment.compiled])
    say(_announcement(missing))
    with locked(home / "envs" / "lock", say) as descriptor:
        for planned in missing:
            if planned.made:
                continue
            try:
                recipe = planned.environment.compiled
                then = partial(compile_into, planned.folder, recipe, say, descriptor)
                runs, python = pip_runs(planned), planned.interpreter
                build(planned.folder, planned.key, python, runs, say, descriptor, then)
            except EnvironmentFailed as error:
                raise EnvironmentFailed(_advice(planned, str(error))) from error
            say(f"Made {planned.folder} ({_size(planned.folder)}).\n")


def pip_runs(planned: Plan) -> list[list[str]]:
    """What pip is asked in turn, in the fresh environment."""
    environment = planned.environment
    pins = for_variant(planned.lock.pins, environment.cpu, planned.variant)
    install = ["install", "--no-deps", "--only-binary", ":all:"]
    runs = []
    if builds := [pin for pin in pins if pin.endswith("+cpu")]:
        runs.append([*install, *from_index(environment.cpu), *builds])
        pins = [pin for pin in pins if pin not in builds]
    runs.append([*install, *pins])
    if planned.editable:
        editable = ["install", "--no-deps", "--no-build-isolation", "--editable"]
        runs.append([*editable, str(planned.editable)])
    return runs


def remove(name: str, home: Path, say: Write) -> int:
    """Remove every environment made for `name`, outdated ones too; return how many there were."""
    _named(name)
    with locked(home / "envs" / "lock", say):
        folders = _folders(name, home)
        for folder in folders:
            delete(folder)
    return len(folders)


def lock(name: str, say: Write) -> Path:
    """Resolve an environment's input anew and write its lock file; return that file's path."""
    environment = _named(name)
    if not IN_CHECKOUT or sys.platform != "linux" or sys.version_info[:2] != LOCKED_WITH:
        wanted = ".".join(map(str, LOCKED_WITH))
        raise EnvironmentFailed(f"A lock is written in a checkout, on Linux, with Python {wanted}.")
    path = _lock_path(environment)
    asked = {variant: requirements(environment, variant) for variant in VARIANTS}
    write_lock(path, environment.about, asked, environment.cpu, say)
    return path


def requirements(environment: Environment, variant: str) -> list[str]:
    """What `environment` asks for directly in a variant, as pip's requirements."""
    text = (ENVS / environment.input).read_text(encoding="utf-8")
    if environment.input.endswith(".toml"):
        project = tomllib.loads(text)
        asked: list[str] = project["project"]["dependencies"] + project["build-system"]["requires"]
        return asked + list(project["dependency-groups"]["dev"])
    lines = (line.partition("#")[0].strip() for _, line in lines_for(text.splitlines(), variant))
    return [line for line in lines if line]


def main(argv: Sequence[str]) -> int:
    """`headway env …`: return 0, or 2 with one clear message on stderr."""
    arguments = _parser().parse_args(argv)
    say = sys.stderr.write
    home = default_home()
    try:
        match arguments.action:
            case "make":
                planned = plan(_named(arguments.name, made=True), home, arguments.variant)
                make([planned], home, say)
                sys.stdout.write(f"{planned.python}\n")
            case "remove":
                sys.stdout.write(f"removed: {remove(arguments.name, home, say)}\n")
            case "lock":
                sys.stdout.write(f"{lock(arguments.name, say)}\n")
            case "setup":
                make([plan_checkout(), *_possible(arguments.names, home, say)], home, say)
            case _:
                sys.stdout.write(render(home))
    except EnvironmentFailed as error:
        say(f"headway env: {error}\n")
        return 2
    return 0


def _possible(names: Iterable[str], home: Path, say: Write) -> list[Plan]:
    """The plans of environments; one that cannot be made on this machine is left out, with why."""
    plans = []
    for name in names:
        try:
            plans.append(plan(_named(name, made=True), home))
        except NotHere as error:
            say(f"Left out: {error}\n")
    return plans


def render(home: Path) -> str:
    """A table of all environments: what runs in them, whether they are made, size, path."""
    rows = [("environment", "engines", "state", "size", "path")]
    for environment in environments().values():
        kinds = ", ".join(environment.engines)
        if environment.own:
            rows.append((environment.name, kinds, "this Python", "", sys.executable))
            continue
        try:
            planned = plan(environment, home)
        except NotHere as error:
            rows.append((environment.name, kinds, "not here", "", str(error)))
            continue
        state, size = ("made", _size(planned.folder)) if planned.made else ("not made", "")
        if not planned.made:
            size = f"{_mb(planned.download_mb)} to download"
        rows.append((environment.name, kinds, state, size, str(planned.folder)))
        for folder in _folders(environment.name, home):
            if folder != planned.folder:
                rows.append((environment.name, "", "not used now", _size(folder), str(folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        + "\n"
        for row in rows
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway env", description="The Python environments that engines run in."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="show them all (also what no ACTION does)")
    made = actions.add_parser("make", help="make one if need be, and print its Python's path")
    made.add_argument("name")
    made.add_argument(
        "--variant", choices=("linux_cpu", "linux_cuda", "macos"), help="not this machine's own"
    )
    actions.add_parser("remove", help="remove one, and what is left of older ones").add_argument(
        "name"
    )
    actions.add_parser("lock", help="in a checkout: resolve one anew").add_argument("name")
    setup = actions.add_parser("setup", help="in a checkout: make .venv, and the environments NAME")
    setup.add_argument("names", nargs="*", metavar="NAME")
    return parser


def _named(name: str, *, made: bool = False) -> Environment:
    known = environments()
    environment = known.get(name)
    if environment is None or (made and environment.own):
        names = ", ".join(other for other in known if not (made and known[other].own))
        raise EnvironmentFailed(f"There is no environment {name!r} to use here; there is: {names}.")
    return environment


def _environment(name: str, table: Mapping[str, object]) -> Environment:
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    cpu = fields.pop("cpu_builds", None)
    if isinstance(cpu, dict):
        left_out = tuple(cpu.get("leave_out", ()))
        fields["cpu"] = CpuBuilds(tuple(cpu["packages"]), cpu["index"], left_out)
    if isinstance(compiled := fields.get("compiled"), dict):
        fields["compiled"] = read_recipe(compiled)
    return Environment(name=name, **fields)  # type: ignore[arg-type]


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([*parts, sys.platform]).encode()).hexdigest()


def _lock_path(environment: Environment) -> Path:
    return ENVS / f"{environment.name}.txt"


def _folders(name: str, home: Path) -> list[Path]:
    return sorted(path for path in (home / "envs").glob(f"{name}-*") if path.is_dir())


def _advice(planned: Plan, cause: str) -> str:
    cpu = planned.environment.cpu
    also = ""
    if planned.variant == "linux_cpu" and cpu.packages:
        also = (
            f" The CPU build of {', '.join(cpu.packages)} comes from {cpu.index}, or from a place "
            "that pip is configured with (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL)."
        )
    return (
        f"The environment {planned.environment.name} could not be made: {cause}\n"
        f"Check that pip reaches its package index, and the free space at {planned.folder.parent}; "
        f"then do the same again.{also}"
    )


def _announcement(missing: Sequence[Plan]) -> str:
    lines = ["Headway needs Python packages that are not there yet. pip will download:\n"]
    for planned in missing:
        amount = f"about {_mb(planned.download_mb)}"
        variant = f", {planned.variant}" if planned.environment.cpu.packages else ""
        lines.append(
            f"  {amount} for {planned.environment.name} ({planned.environment.about}{variant})\n"
            f"    into {planned.folder}\n"
        )
        if planned.environment.compiled is not None:
            lines.append(f"    where {planned.environment.compiled.about()}\n")
    if len(missing) > 1:
        lines.append(f"  about {_mb(sum(p.download_mb or 0 for p in missing))} in all\n")
    return "".join(lines)


def _size(folder: Path) -> str:
    size_bytes = made_bytes(folder)
    return "unfinished" if size_bytes is None else _mb(size_bytes // 10**6)


def _mb(amount: int | None) -> str:
    return "an unknown amount" if amount is None else f"{amount:,} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
