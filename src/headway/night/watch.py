"""Our side of the watcher (`python -m headway.telemetry`): begin, end, and what came of a Run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from headway import codec
from headway.engines.launch import Endpoint, LaunchError
from headway.engines.supervise import descendants
from headway.night.asked import Asked, ReferenceFailure, answering
from headway.night.cores import Cores, kept_to
from headway.suite import Instance
from headway.telemetry import Reading, Watched, chosen, wait_free

# It parses an hour's answers at the end of a Run.
ANSWER_TIMEOUT_S = 120.0
# The first of all process namespaces, by the kernel's own number: only there does a driver number
# processes as we do.
HOST_NAMESPACE = "pid:[4026531836]"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Watcher:
    """A running watcher; `gpus` are the UUIDs of those it can read. Raises ReferenceFailure."""

    process: Asked
    gpus: tuple[str, ...]

    def look(self, gpus: Sequence[str]) -> Mapping[str, Reading]:
        """Read some GPUs now."""
        answer = self.process.ask(do="look", gpus=list(gpus))
        return {uuid: codec.decode(Reading, one, uuid) for uuid, one in answer.items()}

    def begin(
        self, url: str | None, key: str | None, gpus: Sequence[str], cpus: Sequence[int]
    ) -> None:
        """Read everything once, and from now on at its period."""
        self.process.ask(do="watch", url=url, key=key, gpus=list(gpus), cpus=list(cpus))

    def end(self) -> Watched:
        """Read everything a last time; return all of it."""
        watched: Watched = codec.decode(Watched, self.process.ask(do="stop"), "the watcher")
        return watched


@contextlib.contextmanager
def watcher(log: Path) -> Iterator[Watcher]:
    """Start the watcher; it ends with the block, or with us."""
    command = [sys.executable, "-m", "headway.telemetry"]
    with answering(command, log, "the watcher", ANSWER_TIMEOUT_S) as running:
        yield Watcher(running, tuple(running.answer()["gpus"]))


def our_processes() -> list[int]:
    """Return this process and those below it, as a GPU's driver numbers them; none in a container,
    where it numbers them as the host does."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/ns/pid") == HOST_NAMESPACE:  # noqa: PTH115 - no path is meant
            return [os.getpid(), *descendants(os.getpid())]
    return []


@dataclass(slots=True)
class Telemetry:
    """The watcher of a night, started when it is first needed.

    Where it cannot run, Runs have no telemetry, which `say` is told once. `resting` is how much
    memory each GPU used before the last engine on it.
    """

    log: Path
    say: Callable[[str], None]
    stack: contextlib.ExitStack
    cores: Cores
    resting: dict[str, float] = field(default_factory=dict)
    lost: bool = False
    _watcher: Watcher | None = None

    def _ask(self, question: Callable[[Watcher], T]) -> T | None:
        """Ask the watcher; None where there is none any more."""
        try:
            if self._watcher is None and not self.lost:
                with kept_to(self.cores.client):
                    self._watcher = self.stack.enter_context(watcher(self.log))
            return None if self._watcher is None else question(self._watcher)
        except (ReferenceFailure, codec.DecodeError, KeyError, OSError) as error:
            self.lost, self._watcher = True, None
            self.say(f"server, machine and GPUs are not watched from here on: {error}")
            return None

    def gpus_of(self, instance: Instance, device: str) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that an instance may see; none on a CPU, or elsewhere.

        Raises ValueError for one that the suite names and that is not there.
        """
        if instance.base_url is not None or (device == "cpu" and not instance.gpus):
            return ()
        known = self._ask(lambda watcher: watcher.gpus) or ()
        if instance.gpus:
            return chosen(instance.gpus, known) if known else ()
        name = "CUDA_VISIBLE_DEVICES"
        visible = instance.env.get(name, os.environ.get(name, ""))
        with contextlib.suppress(ValueError):  # what only CUDA can name is not watched
            return chosen([name.strip() for name in visible.split(",") if name.strip()], known)
        return ()

    def free(self, gpus: Sequence[str]) -> Mapping[str, Reading]:
        """Wait until GPUs are as they were before the engine before; return what they say then.

        Raises LaunchError (`gpu_not_free`); what is used then counts as resting from there on.
        """
        said: dict[str, Reading] = {}

        def look() -> dict[str, float]:
            said.update(self._ask(lambda watcher: watcher.look(gpus)) or {})
            known = {uuid: one.values or {} for uuid, one in said.items()}
            return {uuid: values["memory"] for uuid, values in known.items() if "memory" in values}

        if gpus:
            mine = {uuid: self.resting[uuid] for uuid in gpus if uuid in self.resting}
            held = wait_free(look, mine)
            for uuid, used in look().items():
                known = held is None and uuid in self.resting
                self.resting[uuid] = min(used, self.resting[uuid]) if known else used
            if held is not None:
                raise LaunchError("gpu_not_free", held)
        return said

    def begin(self, endpoint: Endpoint, gpus: Sequence[str]) -> None:
        """Watch a Run from just before its first send."""
        path, spec = endpoint.launcher.metrics, endpoint.spec
        url = None if path is None else endpoint.base_url.rstrip("/") + path
        self._ask(lambda watcher: watcher.begin(url, spec.api_key, gpus, spec.cpus))

    def end(self) -> Watched:
        """Return all that was read around the Run."""
        return self._ask(lambda watcher: watcher.end()) or Watched()
