"""Verify every distinct output of a night against transformers, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.core import Verification
from headway.correctness import Pair
from headway.engines import launch as launcher
from headway.results import Generated
from headway.workload import pair_key

# Loading a large model takes minutes; nothing that it is asked later should take longer.
ANSWER_TIMEOUT_S = 1800.0


class ReferenceFailure(RuntimeError):
    """The reference did not answer; the message is one sentence."""


class Reference:
    """A running reference: answers one line of JSON per line, each within `timeout_s`."""

    def __init__(
        self, process: subprocess.Popen[str], log: Path, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._process = process
        self._log = log
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
            raise ReferenceFailure(f"the reference ended: {said}") from error
        finally:
            watchdog.cancel()
        if answer.get("ready") is False:
            raise ReferenceFailure(f"the reference cannot be loaded: {answer.get('error')}")
        return answer

    def verify(self, pair: Pair) -> Verification:
        """Judge one output by one teacher-forced pass."""
        answer = self.ask(
            op="verify",
            id=pair.key,
            prompt=list(pair.prompt),
            output=list(pair.output),
            epsilon=0.0,  # what is wrong is judged later, by each instance's own dtype
        )
        if "error" in answer:
            return Verification(pair.key, error=answer["error"])
        return Verification(
            key=pair.key,
            num_tokens=answer["num_tokens"],
            max_gap=answer["max_gap"],
            num_nonargmax=answer["num_nonargmax"],
            min_margin=answer["min_margin"],
            nonargmax=tuple((int(i), float(g), int(r)) for i, g, r in answer["nonargmax"]),
        )

    def generate(self, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool) -> Generated:
        """Have the reference continue a prompt by its own `generate`."""
        key = pair_key(prompt, ())
        answer = self.ask(
            op="generate", id=key, prompt=list(prompt), max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        if "error" in answer:
            raise ReferenceFailure(f"the reference cannot continue a prompt: {answer['error']}")
        return Generated(key, tuple(answer["output"]), tuple(map(float, answer["margins"])))


@contextmanager
def reference(
    python: Path, model: Mapping[str, Any], device: str, log: Path, say: Callable[[str], None]
) -> Iterator[Reference]:
    """Start the reference for a model; it ends with the block, or with us."""
    command = [str(python), str(launcher.HERE / "boot.py"), "headway.engines.reference"]
    command += ["--model-json", json.dumps(dict(model)), "--device", device]
    say(f"reference for {model['name']}: loading")
    with (
        log.open("a", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        try:
            running = Reference(process, log)
            running.answer()
            yield running
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
