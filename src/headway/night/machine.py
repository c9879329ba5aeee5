"""The machine around a measurement: the kernels that watch it, and waiting until it is quiet."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.engines import launch as launcher
from headway.telemetry import Ticks, others_share, read_ticks

# Importing torch and touching the memory takes seconds; a reading, a quarter of one.
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 30.0, 10.0
# Threads of an engine that wait for more work by spinning do so for up to 200 ms (the default of
# Intel's OpenMP; OpenBLAS 110, GNU's OpenMP less). A reading before that would measure them.
SPIN_S = 0.25
# The machine is quiet when others use no more than this share of its cores for as long as a look.
QUIET_SHARE, LOOK_S = 0.05, 0.5


class KernelFailure(RuntimeError):
    """The calibration kernels gave no reading; the message is one sentence."""


class Kernels:
    """Running calibration kernels: `sizes` says what work each does."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid
        self.sizes: Mapping[str, Mapping[str, int]] = {}

    def read(
        self,
        timeout_s: float = ANSWER_TIMEOUT_S,
        *,
        pause_s: float = SPIN_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Mapping[str, float]:
        """Return the seconds that each kernel takes now; KernelFailure when none come.

        It waits `pause_s` first, so that what an engine did last has come to rest.
        """
        assert self._process.stdin is not None
        sleep(pause_s)
        with contextlib.suppress(OSError):  # the answer that does not come says why
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        answer = self._answer(timeout_s)
        seconds = answer.get("seconds")
        if not isinstance(seconds, dict) or not all(map(_is_time, seconds.values())):
            raise KernelFailure(f"the calibration kernels answered {answer}, not seconds of each")
        return {kernel: float(value) for kernel, value in seconds.items()}

    def start(self, timeout_s: float) -> None:
        """Wait until they are ready; KernelFailure with the reason when they cannot be."""
        answer = self._answer(timeout_s)
        if answer.get("ready") is not True:
            raise KernelFailure(str(answer.get("error", f"the calibration kernels said {answer}")))
        self.sizes = dict(answer.get("kernels", {}))

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        watchdog = threading.Timer(timeout_s, give_up)
        watchdog.start()
        try:
            answer = json.loads(self._process.stdout.readline())
        except ValueError as error:  # the end, or half a line
            raise KernelFailure(self._why(timeout_s if late.is_set() else None)) from error
        finally:
            watchdog.cancel()
        return answer if isinstance(answer, dict) else {"answer": answer}

    def _why(self, timeout_s: float | None) -> str:
        if timeout_s is not None:
            return f"the calibration kernels did not answer within {timeout_s:g} s"
        said = launcher.tail(self._log, 1) or "they said nothing"
        return f"the calibration kernels ended: {said}"


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value < math.inf


@contextmanager
def kernels(
    python: Path, device: str, log: Path, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[Kernels]:
    """Start the calibration kernels in a process of their own; it ends with the block, or with us.

    It has a session of its own, so that an interrupt from the terminal is ours to handle, and ends
    when its standard input closes, which it does however we end.
    """
    command = [str(python), str(launcher.HERE / "boot.py"), "headway.engines.calibration"]
    command += ["--device", device]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise KernelFailure(
                f"the calibration kernels cannot be started with {python}: {error.strerror}"
            ) from error
    running = Kernels(process, log)
    try:
        running.start(start_timeout_s)
        yield running
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # what could not be written is not to be read either
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def wait_quiet(
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    look: Callable[[], Ticks | None] | None = None,
) -> float:
    """Wait until others leave the machine alone, `limit_s` at most; return the seconds waited.

    Others are all processes but this one and its descendants: an engine that spins while it has
    nothing to do is ours, a container's is not. Quiet is at most `QUIET_SHARE` of all cores over
    `LOOK_S`. One look is taken at least, unless nothing may be waited for or /proc tells nothing.
    """
    look = look or read_ticks
    started_s = clock()
    before = look()
    if limit_s <= 0 or before is None:
        return 0.0
    while (left_s := limit_s - (clock() - started_s)) > 0:
        sleep(min(LOOK_S, left_s))
        after = look()
        if after is None or others_share(before, after) <= QUIET_SHARE:
            break
        before = after
    return clock() - started_s
