"""Owns the making of one virtual environment: the lock on it, venv, the runs of pip, the mark.

An environment counts as made once its mark holds the key it was made for, which comes last. One
whose making was cut short keeps an empty mark and is made anew. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Write = Callable[[str], object]

MARK = "headway-environment.json"
PIP = ("-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
SHOWN_OF_PIP = r" *Downloading .* [MG]B\)|Installing|ERROR"


class EnvironmentFailed(Exception):
    """An environment cannot be made, locked or named; the message says why and what to do."""


def is_made(folder: Path, key: str) -> bool:
    """Whether an environment made for `key` is in `folder`; costs two file accesses."""
    return _mark(folder).get("key") == key and (folder / "bin" / "python").exists()


def made_bytes(folder: Path) -> int | None:
    """How large the environment in `folder` was when made; None when it is not finished."""
    size_bytes = _mark(folder).get("size_bytes")
    return size_bytes if isinstance(size_bytes, int) else None


def build(
    folder: Path,
    key: str,
    interpreter: Path,
    pip_runs: Sequence[Sequence[str]],
    say: Write,
    keep_open: int | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Make an environment of `interpreter` in `folder`, replacing what was made there before, run
    its pip once for each of `pip_runs`, and do what comes `then`. Raises EnvironmentFailed."""
    if folder.exists() and not (folder / MARK).exists():
        raise EnvironmentFailed(
            f"{folder} is there, but not made by Headway: move it away, or delete it."
        )
    try:
        if folder.exists():
            delete(folder)
        folder.mkdir(parents=True)
        (folder / MARK).write_text("{}", encoding="utf-8")
        run([str(interpreter), "-I", "-m", "venv", str(folder)], "venv", say, keep_open)
        for arguments in pip_runs:
            run_pip(folder / "bin" / "python", arguments, say, keep_open)
        then()
        size_bytes = sum(path.lstat().st_size for path in folder.rglob("*"))
        (folder / "mark").write_text(
            json.dumps({"key": key, "size_bytes": size_bytes}), encoding="utf-8"
        )
        (folder / "mark").replace(folder / MARK)
    except OSError as error:
        raise EnvironmentFailed(f"{folder} could not be written: {error}.") from error


def delete(folder: Path) -> None:
    """Delete an environment."""
    # Without its key first, so that one only partly deleted is not taken for a whole one; and the
    # mark last, so that it is still known to be ours.
    (folder / MARK).write_text("{}", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    shutil.rmtree(folder)


@contextlib.contextmanager
def locked(path: Path, say: Write) -> Iterator[int]:
    """Hold the lock file `path`, waiting for whoever holds it; yields its descriptor."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise EnvironmentFailed(
            f"{path.parent} cannot be written ({error.strerror}); HEADWAY_HOME names another place."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting: another process is making an environment in {path.parent}.\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def run_pip(
    python: Path, arguments: Sequence[str], say: Write, keep_open: int | None = None
) -> None:
    """Run `python`'s pip; tell `say` what it fetches. Raises EnvironmentFailed with its last lines.

    `keep_open` is a file descriptor that pip inherits: a lock held by it outlives this process if
    pip does.
    """
    run([str(python), *PIP, *arguments], "pip", say, keep_open)


def run(
    command: Sequence[str],
    name: str,
    say: Write,
    keep_open: int | None = None,
    shown: str = SHOWN_OF_PIP,
) -> None:
    """Run `command`, like `run_pip`; lines that begin with a match of `shown` are told."""
    tail: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=() if keep_open is None else (keep_open,),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            if re.match(shown, line):
                say(f"  {line.strip()[:100]}\n")
    if process.returncode:
        lines = "".join(f"\n    {line}" for line in tail)
        raise EnvironmentFailed(f"{name} ended with {process.returncode}. Its last lines:{lines}")


def _mark(folder: Path) -> dict[str, object]:
    """What the mark in `folder` says; empty for a folder that is not there or not finished."""
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}
