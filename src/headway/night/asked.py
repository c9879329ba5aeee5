"""A process in a model's environment that answers our questions: one line of JSON for each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.engines import launch as launcher

# Loading a large model takes minutes; nothing that it is asked later should take longer.
ANSWER_TIMEOUT_S = 1800.0


class ReferenceFailure(RuntimeError):
    """Such a process did not answer, or could not; the message is one sentence."""


class Asked:
    """A running process (`what` it is called in messages); answers each within `timeout_s`."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        log: Path,
        what: str,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._process = process
        self._log = log
        self._what = what
        self._timeout_s = timeout_s

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one question and wait for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Read one answer; raises ReferenceFailure when the process ended instead."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout_s, self._process.kill)
        watchdog.start()
        try:
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except ValueError as error:  # the end, or half a line
            said = launcher.tail(self._log, 1) or "it said nothing"
            raise ReferenceFailure(f"{self._what} ended: {said}") from error
        finally:
            watchdog.cancel()
        if answer.get("ready") is False:
            raise ReferenceFailure(f"{self._what} cannot be loaded: {answer.get('error')}")
        return answer


@contextmanager
def asked(
    python: Path, module: str, model: Mapping[str, Any], log: Path, what: str, *options: str
) -> Iterator[tuple[Asked, dict[str, Any]]]:
    """Start `module` for a model, which speaks as `headway.engines.lines`; ends with the block.

    With it comes what it said when it was ready.
    """
    command = [str(python), str(launcher.HERE / "boot.py"), module]
    command += ["--model-json", json.dumps(dict(model)), *options]
    with answering(command, log, what) as running:
        yield running, running.answer()


@contextmanager
def answering(
    command: Sequence[str], log: Path, what: str, timeout_s: float = ANSWER_TIMEOUT_S
) -> Iterator[Asked]:
    """Start a process that answers; it ends with the block, or with us, however we end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        try:
            yield Asked(process, log, what, timeout_s)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
