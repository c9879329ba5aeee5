"""Measuring: a night of the suite by `headway run`, then what a night does not measure.

The night is a subprocess, the command that is shipped. What is measured beside it (how fast the
machine reads, how many bytes of weights a step reads, where a step's time goes) is kept in the
night's folder, so that the folder can be read again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.rows import NAIVE, Machine
from engines.weights import step_bytes
from headway import night
from headway.engines.models import ModelError, default_home, prepare
from headway.environment import python_for
from headway.fingerprint import find_device
from headway.installer import EnvironmentFailed
from headway.results import Results

BENCH = Path(__file__).resolve().parent.parent
BOOT = BENCH.parent / "engines" / "boot.py"
BESIDE = "bench_engines.json"
# More in flight changes nothing for an engine that answers one request at a time.
NAIVE_MOST = 8
USAGE = 2
PROFILE_LIMIT_S = 600
Say = Callable[[str], object]
Rates = Mapping[str, float]
RATES = ("bandwidth_bytes_per_s", "matrix_flops")


class BenchError(RuntimeError):
    """The benchmark cannot go on; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be measured: names of the suite's engines and workloads, levels in flight."""

    suite: str
    folder: Path
    engines: tuple[str, ...]
    workloads: tuple[str, ...]
    levels: tuple[int, ...]
    launches: int
    device: str = "auto"
    model: str | None = None
    dtype: str | None = None
    scale: float | None = None
    verify: bool = True
    naive_everywhere: bool = False
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beside:
    """What was measured beside a night, and is kept with it."""

    step_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    matrix_flops: float | None = None
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        """What rows need of it."""
        return Machine(self.step_bytes, self.bandwidth_bytes_per_s)


def command(options: Options) -> list[str]:
    """Return the `headway run` that measures what the options say."""
    levels = ", ".join(map(str, options.levels))
    sets = [f"workload.{name}.concurrency=[{levels}]" for name in options.workloads]
    sets.append(f"suite.launches={options.launches}")
    sets += [] if options.model is None else [f'suite.model="{options.model}"']
    sets += [] if options.dtype is None else [f'suite.dtype="{options.dtype}"']
    if options.scale is not None and "mixture" in options.workloads:
        sets.append(f"workload.mixture.scale={options.scale:g}")
    words = [str(Path(sys.executable).with_name("headway")), "run", options.suite]
    words += ["--device", options.device]
    words += [word for name in options.engines for word in ("--engine", name)]
    words += [word for text in (*sets, *options.sets) for word in ("--set", text)]
    words += ["--reports", str(options.folder), "-q", "-k", _chosen(options)]
    return words if options.verify else [*words, "-p", "engines.measure_only"]


def _chosen(options: Options) -> str:
    """Return pytest's expression: the workloads, and hf_naive no further than it needs to go."""
    chosen = f"(test_measure or {' or '.join(options.workloads)})"
    beyond = [f"c{level}" for level in options.levels if level > NAIVE_MOST]
    if options.naive_everywhere or not beyond or not _naive_below(options):
        return chosen
    return f"{chosen} and not ({NAIVE} and ({' or '.join(beyond)}))"


def _naive_below(options: Options) -> bool:
    """Whether a lower level can stand for the high ones: one with requests that wait."""
    return any(1 < level <= NAIVE_MOST for level in options.levels)


def measure(options: Options) -> Path:
    """Run the night; returns its folder. Raises BenchError where there is none to read."""
    options.folder.mkdir(parents=True, exist_ok=True)
    before = {path: _age(path) for path in _nights(options.folder)}
    status = _run(command(options))
    written = [path for path in _nights(options.folder) if _age(path) != before.get(path)]
    if status == USAGE or not written:
        raise BenchError(f"headway run ended with exit status {status}; see above")
    return max(written, key=_age)


def _env() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths}


def _run(words: Sequence[str]) -> int:
    """Run a command to its end; an interrupt reaches it too, and it is waited for then as well."""
    process = subprocess.Popen(words, env=_env(), stdout=sys.stderr)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def _nights(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("*/journal.jsonl")]


def _age(night_folder: Path) -> float:
    return (night_folder / "journal.jsonl").stat().st_mtime


def read(folder: Path) -> Results:
    """Read a night; raises BenchError."""
    try:
        return night.read(folder)[1]
    except night.JournalError as error:
        raise BenchError(str(error)) from error


def read_beside(folder: Path) -> Beside:
    """Read what was measured beside a night; what nobody measured is None."""
    path = folder / BESIDE
    if not path.is_file():
        return Beside()
    try:
        return Beside(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error


def rates(options: Options, say: Say) -> Rates:
    """Measure what this machine can do: bytes and multiplications a second, where it says so."""
    device = find_device(options.device)
    found = _told(device, "rates", ["--device", device], say)
    return {name: found[name] for name in RATES if found.get(name) is not None}


def look_beside(folder: Path, options: Options, before: Rates, say: Say) -> Beside:
    """Measure what a night does not, and keep it with the night.

    A bound is the best that was seen, `before` the night or after it: machines that are shared
    have hours in which they do less.
    """
    results, device = read(folder), find_device(options.device)
    after = rates(options, say)
    best = {name: max(before.get(name, 0), value) for name, value in (before | after).items()}
    found = Beside(
        step_bytes=_step_bytes(results, say),
        bandwidth_bytes_per_s=best.get("bandwidth_bytes_per_s"),
        matrix_flops=best.get("matrix_flops"),
        profile=_profile(results, options, device, say),
    )
    text = json.dumps(asdict(found), indent=1, allow_nan=False)
    (folder / BESIDE).write_text(text + "\n", encoding="utf-8")
    return found


def _step_bytes(results: Results, say: Say) -> int | None:
    model = results.suite.instances[0]
    if model.model == "fake":
        return None
    try:
        folder = prepare(model.model, default_home())
        config = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    except (ModelError, OSError, ValueError) as error:
        say(f"no share of the bandwidth: {error}\n")
        return None
    return step_bytes(config, model.dtype)


def _profile(results: Results, options: Options, device: str, say: Say) -> dict[str, Any]:
    """Return where steps of each of our engines go, by engine."""
    found = {}
    for one in results.suite.instances:
        if one.kind == "paged" and one.name in options.engines:
            asked = {"kind": one.kind, "args": dict(one.args), "model": one.model}
            asked |= {"dtype": one.dtype, "device": device, "rows": list(options.levels)}
            say(f"profile of {one.name}\n")
            found[one.name] = _told(device, "engines.profile", [json.dumps(asked)], say)
    return found


def _told(device: str, module: str, words: Sequence[str], say: Say) -> dict[str, Any]:
    """Return the line of JSON that a module says in the environment `hf`; empty if it fails."""
    try:
        python = python_for("reference", say=say)
        done = subprocess.run(
            [str(python), str(BOOT), module, *words],
            env=_env(),
            capture_output=True,
            text=True,
            timeout=PROFILE_LIMIT_S,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (
        EnvironmentFailed,
        OSError,
        subprocess.SubprocessError,
        ValueError,
        IndexError,
    ) as error:
        errors = (getattr(error, "stderr", "") or "").strip().splitlines()
        say(f"{module} said nothing on {device}: {errors[-1] if errors else error}\n")
        return {}
    return answer
