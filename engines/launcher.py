"""What a launch is made of: which engine, how its kind is started, and why it did not come up.

Standard library only: this runs in the instrument's process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.core import Capabilities, EngineInfo

if TYPE_CHECKING:
    from headway.engines.endpoint import Endpoint

HERE = Path(__file__).resolve().parent


class LaunchError(RuntimeError):
    """An engine did not come up. `kind` is a stable word, the message one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything needed to start one engine. `model` is a ModelFolder as JSON values.

    `equal` holds the settings that all engines of a comparison are to share, by their common names
    (`launcher.SETTINGS`); empty where each engine runs as its vendor recommends. `gpus` are those
    it may see (empty: all), `cpus` the cores that its processes are kept to, and must size their
    thread pools by (empty: all). `base_url` is where a server is that runs already. `made` is what
    was made of the model for engines of this kind (`Launcher.prepare`). Another commit's engine has
    that commit's `boot`, or is found from its `cwd` (None: ours).
    """

    instance: str
    kind: str
    model: Mapping[str, Any]
    dtype: str
    device: str
    python: Path
    log: Path
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    start_timeout_s: float = 600.0
    lock: int | None = None  # a descriptor that its supervisor holds until all of it has ended
    boot: Path = HERE / "boot.py"
    cwd: Path | None = None
    equal: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    image: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    cpus: tuple[int, ...] = ()
    made: str | None = None

    @property
    def served_name(self) -> str:
        """The model's name, as the engine must list it."""
        return str(self.model["name"])

    @property
    def host(self) -> str:
        """The address that a server we start listens on.

        In a container that is all of them, of which only its port on our loopback is published.
        """
        return "127.0.0.1" if self.image is None else "0.0.0.0"

    @property
    def config(self) -> Path:
        """Where the launcher's `config` of this launch is written, if it has one."""
        return self.log.with_suffix(".config.json")

    @property
    def executable(self) -> str:
        """Its Python: a path means what it means here, a bare name is one on the PATH."""
        return str(self.python if len(self.python.parts) == 1 else self.python.absolute())


def _no_env(spec: LaunchSpec) -> Mapping[str, str]:
    return {}


def _no_config(spec: LaunchSpec) -> str | None:
    return None


def _our_name(spec: LaunchSpec) -> str | None:
    return spec.served_name


def _as_it_is(spec: LaunchSpec) -> list[str] | None:
    return None


# The settings that decide what a comparison compares, by the names that reports use for all kinds.
SETTINGS = (
    "max_num_seqs",  # sequences that may run at once
    "max_num_batched_tokens",  # tokens in one step, prefill and decode together
    "max_model_len",  # tokens of a sequence, prompt and output
    "prefix_caching",
    "threads",  # of the CPU
)


@dataclass(frozen=True, slots=True)
class Launcher:
    """How engines of one kind are started, and what their endpoint understands.

    `command` gives the command that serves a spec on a port (None: it runs already, elsewhere);
    `env` what its processes need in their environment; `config` the content of a file that is
    written to `spec.config` before (None: it needs none). `health` answers 200 when it serves,
    `models` lists what it serves, as OpenAI does. `info` reads back from the running engine who it
    is. `can` is what its documentation says. It empties its prefix cache by a POST to `reset`, if
    it has that, and says how it is at `metrics`, which may answer 404. `equal` names its own
    argument for each of `SETTINGS` that it has; `not NAME` is one that means the opposite. `served`
    is the name by which it must list the model (None: whatever the one model is called that it
    lists). Its `environment` is one that we make, or is given by the suite, or it needs no Python.
    `prepare` names what is to be made of the model before the first launch, where its folder will
    not do: a module of Headway and its arguments, run beside the reference, whose last line becomes
    the spec's `made`. `image`: its command runs in an image as well; `container` is what its vendor
    has a container given.
    """

    command: Callable[[LaunchSpec, int], list[str]] | None
    info: Callable[[Endpoint], EngineInfo]
    can: Capabilities = field(default_factory=Capabilities)
    env: Callable[[LaunchSpec], Mapping[str, str]] = _no_env
    prepare: Callable[[LaunchSpec], list[str] | None] = _as_it_is
    health: str = "/health"
    models: str = "/v1/models"
    reset: str | None = None
    metrics: str | None = "/metrics"
    equal: Mapping[str, str] = field(default_factory=dict)
    served: Callable[[LaunchSpec], str | None] = _our_name
    config: Callable[[LaunchSpec], str | None] = _no_config
    environment: Literal["made", "given", "none"] = "made"
    image: bool = False
    container: tuple[str, ...] = ()

    def arguments(self, spec: LaunchSpec) -> dict[str, Any]:
        """Return an engine's own arguments: what all are to share, and what the suite says of it.

        Raises LaunchError for a setting to share that engines of this kind do not have.
        """
        missing = [name for name in spec.equal if name not in self.equal]
        if missing:
            known = ", ".join(self.equal) or "none of these settings"
            message = f"{spec.instance} is to be tuned equally, but {spec.kind} has no "
            message += f"{missing[0]}; it has: {known}"
            raise LaunchError("not_equal", message)
        shared = {}
        for name, value in spec.equal.items():
            own = self.equal[name]
            shared[own.removeprefix("not ")] = not value if own.startswith("not ") else value
        return shared | dict(spec.args)


def flags(arguments: Mapping[str, Any], *, no: str = "--no-", dash: str = "-") -> list[str]:
    """Return arguments as the flags of a command line: `max_num_seqs = 8` is `--max-num-seqs 8`.

    True is the flag alone, false its opposite (`no` before the name; an empty `no` leaves it out);
    a list is several values, a table is JSON. `dash` stands between the words of a flag.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", dash)
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words += [f"{no}{flag}"] if no else []
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def weights(spec: LaunchSpec) -> str:
    """Return the folder of a model's weights; LaunchError where there are none on disk."""
    if spec.model.get("synthetic"):
        message = f"{spec.kind} reads a model's weights from disk, and {spec.served_name} has none"
        raise LaunchError("no_weights", message)
    return str(spec.model["path"])
