"""An engine in a container: what runs its image, where its processes are, and what ends it.

Its server listens on all of the container's addresses, and its port is published on our loopback
only. What it compiles is kept below Headway's home, by the image's digest. Standard library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from headway.engines.launcher import HERE, Launcher, LaunchError, LaunchSpec
from headway.engines.models.store import default_home
from headway.engines.supervise import descendants

CLIENTS = ("docker", "podman")
BY_DIGEST = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}")
INSIDE = PurePosixPath("/headway")
CACHE = INSIDE / "cache"
# Each compiler's own name for where it keeps what it made.
CACHES = {
    "XDG_CACHE_HOME": "",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Container:
    """One container, from before it is made: by the name that we give it."""

    client: str
    name: str
    cidfile: Path

    def _inspect(self, what: str) -> str:
        """Ask about it; empty where there is nothing to be known."""
        answer = _ask(self.client, "inspect", "--format", what, self.name)
        return "" if answer is None else answer

    def runs(self) -> bool:
        """Whether it runs: then the port that it publishes is its own."""
        return self._inspect("{{.State.Running}}") == "true"

    def pids(self) -> list[int]:
        """Return its processes; empty where they are not seen from here, as on another machine."""
        pid, _, container = self._inspect("{{.State.Pid}} {{.Id}}").partition(" ")
        try:
            ours = container and container in Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return []
        return [int(pid), *descendants(int(pid))] if ours else []

    def end(self) -> list[str]:
        """Return the command that ends it, and waits until it has ended."""
        script = str(HERE / "end_container.py")
        return [sys.executable, "-I", script, self.client, str(self.cidfile), self.name]


def prepare(spec: LaunchSpec) -> Container:
    """Find the client and have the image here; raises LaunchError.

    Fetching an image takes as long as a network takes: no part of any launch time.
    """
    assert spec.image is not None
    client = next((name for name in CLIENTS if _works(name)), None)
    if client is None:
        message = f"{spec.instance} runs in an image, and neither docker nor podman answers here"
        raise LaunchError("no_container_client", message)
    if _ask(client, "image", "inspect", "--format", "{{.Id}}", spec.image) is None:
        with spec.log.open("ab") as log:
            command = [client, "pull", spec.image]
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=spec.start_timeout_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                done = None
        if done != 0:
            why = f"gave {done}" if done is not None else f"took over {spec.start_timeout_s:g} s"
            message = f"{spec.instance}: {client} pull {spec.image} {why}; see {spec.log}"
            raise LaunchError("no_image", message)
    cidfile = spec.log.with_suffix(".cid")
    cidfile.unlink(missing_ok=True)  # a client refuses one that is there
    return Container(client, f"headway-{uuid.uuid4().hex[:12]}", cidfile)


def _works(client: str) -> bool:
    """Whether a client is here, and a daemon behind it if it needs one."""
    return shutil.which(client) is not None and _ask(client, "version") is not None


def _ask(client: str, *words: str) -> str | None:
    """Return what a client says, or None where it fails."""
    try:
        answer = subprocess.run(
            [client, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def inside(spec: LaunchSpec) -> LaunchSpec:
    """Return a spec as it reads in the container."""
    model = dict(spec.model)
    if not model.get("synthetic"):
        folder, within = _model_folder(Path(model["path"]))
        model["path"] = f"{INSIDE / 'models' / folder.name}{within}"
    return replace(spec, model=model, log=Path(INSIDE / spec.log.name))


def _model_folder(path: Path) -> tuple[Path, str]:
    """Return the folder to mount, and where in it the model lies.

    A snapshot of the hub's cache holds links to files that lie beside all snapshots.
    """
    if path.parent.name == "snapshots":
        return path.parents[1], f"/snapshots/{path.name}"
    return path, ""


def command(
    container: Container, spec: LaunchSpec, launcher: Launcher, port: int, env: Mapping[str, str]
) -> list[str]:
    """Return the command that runs the image; the client takes the values of `env` from its own.

    A kind with a command of its own replaces the image's entrypoint; kind `image` follows it.
    """
    assert launcher.command is not None
    assert spec.image is not None
    there = inside(spec)
    words = launcher.command(there, port)
    entry = [] if spec.kind == "image" else ["--entrypoint", words.pop(0)]
    kept = default_home() / "images" / spec.image.rpartition(":")[2][:16]
    kept.mkdir(parents=True, exist_ok=True)
    mounts = [(kept, CACHE, "")]
    if not spec.model.get("synthetic"):
        folder, within = _model_folder(Path(spec.model["path"]))
        at = PurePosixPath(there.model["path"].removesuffix(within))
        mounts.append((folder, at, ",readonly"))
    if spec.config.exists():
        mounts.append((spec.config, PurePosixPath(there.config), ",readonly"))
    caches = [f"{name}={CACHE / folder}" for name, folder in CACHES.items() if name not in env]
    return [
        *(container.client, "run", "--rm", "--init", "--pull", "never"),
        *("--name", container.name, "--cidfile", str(container.cidfile)),
        *("--publish", f"127.0.0.1:{port}:{port}"),
        *("--ipc", "host"),
        *_gpus(container.client, spec),
        *(("--cpuset-cpus", ",".join(map(str, spec.cpus))) if spec.cpus else ()),
        *launcher.container,
        *(
            word
            for here, at, how in mounts
            for word in ("--mount", f"type=bind,source={here.absolute()},target={at}{how}")
        ),
        *(w for assigned in caches for w in ("--env", assigned)),
        *(w for name in env for w in ("--env", name)),
        *entry,
        spec.image,
        *words,
    ]


def _gpus(client: str, spec: LaunchSpec) -> list[str]:
    if not spec.device.startswith("cuda"):
        return []
    if client == "podman":  # names them as the container device interface does
        return [w for gpu in spec.gpus or ("all",) for w in ("--device", f"nvidia.com/gpu={gpu}")]
    # docker reads this as one line of CSV
    return ["--gpus", f'"device={",".join(spec.gpus)}"' if spec.gpus else "all"]
