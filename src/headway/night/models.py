"""The models of a night, prepared before the first launch in the engines' own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.engines import fake
from headway.engines import launch as launcher
from headway.results import ModelFacts

# How a model's own messages begin, among those of the libraries that load it.
OURS = "headway: "


class ModelFailure(RuntimeError):
    """A model cannot be had; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model's folder as its engines want it described, and what the night knows of it."""

    folder: Mapping[str, Any]
    facts: ModelFacts


def prepare(name: str, python: Path, home: Path, say: Callable[[str], None]) -> PreparedModel:
    """Fetch and convert a model if need be; `say` is told what that takes before it is done."""
    if name == "fake":
        return _prepared(fake.MODEL)
    name_only, revision = split_revision(name)
    words = ["headway.engines.models", name_only]
    words += ["--revision", revision] if revision else []
    return _prepared(json.loads(make(words, f"model {name}", python, home, say)))


def make(
    words: Sequence[str], what: str, python: Path, home: Path, say: Callable[[str], None]
) -> str:
    """Run a module of Headway with its arguments in `python`, and return the last line it prints.

    `say` is told its own messages. Raises ModelFailure with its last one.
    """
    # Supervised: a night that is killed does not leave a download or a conversion behind.
    command = [sys.executable, "-I", str(launcher.HERE / "supervise.py"), str(python)]
    command += [str(launcher.HERE / "boot.py"), *words, "--home", str(home)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        last = ""
        for line in process.stderr:
            last = line.strip() or last
            if line.startswith(OURS):  # not a library's progress bar
                say(f"{what}: {line.removeprefix(OURS).strip()}")
        answer = process.stdout.read().strip()
    if process.returncode != 0 or not answer:
        raise ModelFailure(f"{what} cannot be prepared: {last}")
    return answer.splitlines()[-1]


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `org/model@revision`; a folder's path is left whole."""
    if name.startswith(("/", ".", "~")):
        return name, None
    plain, _, revision = name.partition("@")
    return plain, revision or None


def _prepared(folder: Mapping[str, Any]) -> PreparedModel:
    facts = ModelFacts(
        name=folder["name"],
        revision=folder["revision"],
        vocab_size=folder["vocab_size"],
        special_ids=tuple(folder["special_ids"]),
        context_length=folder["context_length"],
        eos_ids=tuple(folder["eos_ids"]),
    )
    return PreparedModel(folder, facts)
