"""Verify every distinct output of a night against transformers, in a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headway.core import Verification
from headway.correctness import Pair
from headway.engines import launch as launcher
from headway.results import Generated
from headway.workload import pair_key


class ReferenceFailure(RuntimeError):
    """The reference did not answer; the message is one sentence."""


class Reference:
    """A running reference: answers one line of JSON per line."""

    def __init__(self, stdin: IO[str], stdout: IO[str], log: Path) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._log = log

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one question and wait for its answer."""
        try:
            self._stdin.write(json.dumps(question) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer below says why
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Read one answer; raises ReferenceFailure when the process ended instead."""
        line = self._stdout.readline()
        if not line:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise ReferenceFailure(f"the reference ended: {(lines or ['it said nothing'])[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def verify(self, pair: Pair, epsilon: float) -> Verification:
        """Judge one output by one teacher-forced pass."""
        answer = self.ask(
            op="verify",
            id=pair.key,
            prompt=list(pair.prompt),
            output=list(pair.output),
            epsilon=epsilon,
        )
        if "error" in answer:
            return Verification(pair.key, error=answer["error"])
        return Verification(
            key=pair.key,
            num_tokens=answer["num_tokens"],
            max_gap=answer["max_gap"],
            num_nonargmax=answer["num_nonargmax"],
            num_violations=answer["num_violations"],
            first_violation=answer["first_violation"],
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
        return Generated(key, tuple(answer["output"]))


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
        assert process.stdout is not None
        try:
            running = Reference(process.stdin, process.stdout, log)
            running.answer()
            yield running
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
