"""Where prepared models live, and how one is made exactly once.

A model is built in `.NAME.partial` beside its place and moved there whole. The builder holds a
lock, which the operating system releases when its process dies, however it dies; so a partial
folder found by the holder of the lock is a leftover, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headway.engines.models.folder import ModelError, ModelFolder, read_manifest, write_manifest


def default_home() -> Path:
    """Where Headway keeps what it makes: $HEADWAY_HOME, or ~/.headway.

    Absolute, as an engine may be started elsewhere.
    """
    return Path(os.environ.get("HEADWAY_HOME") or Path.home() / ".headway").absolute()


def say(text: str) -> None:
    """Tell the person who waits; stdout belongs to the caller of the command."""
    sys.stderr.write(f"headway: {text}\n")
    sys.stderr.flush()


def build_once(
    home: Path, name: str, num_bytes: int, build: Callable[[Path], ModelFolder]
) -> ModelFolder:
    """Return the finished model `name` in `home`, made by `build(empty folder)` if need be.

    `num_bytes` is the free space that building takes. Raises ModelError when there is less.
    """
    place = home / "models" / name
    finished = read_manifest(place)
    if finished is not None:
        return finished
    try:
        with _lock(home / "locks" / f"model-{name}.lock", name):
            return read_manifest(place) or _build(place, num_bytes, build)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(place, num_bytes) from error
        raise ModelError(f"cannot write the model {name} in {home}: {error}") from error


def _build(place: Path, num_bytes: int, build: Callable[[Path], ModelFolder]) -> ModelFolder:
    partial = place.with_name(f".{place.name}.partial")
    for leftover in (partial, place):
        if leftover.exists():
            say(f"removing the unfinished or damaged {leftover}")
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    try:
        if shutil.disk_usage(partial).free < num_bytes:
            raise _disk_full(place, num_bytes)
        built = build(partial)
        write_manifest(replace(built, path=partial))
        partial.replace(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return replace(built, path=place)


def _disk_full(place: Path, num_bytes: int) -> ModelError:
    return ModelError(
        f"preparing {place.name} needs {num_bytes / 1e6:.0f} MB of free space in {place.parent}: "
        "make room, or name another place with --home or HEADWAY_HOME"
    )


@contextmanager
def _lock(file: Path, name: str) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is preparing {name}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
