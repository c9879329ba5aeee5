"""A client that behaves as docker does, and the daemon behind it: loaded or run by path.

    container_stub.py daemon FOLDER          ends all its containers when standard input closes
    FOLDER/bin/docker ...                    this file again, as the client

A container is a process of the daemon's on this machine. It outlives the client that asked for it;
`stop` ends it after a twentieth of the grace it is given. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

WITH_VALUE = frozenset(
    (
        *("--name", "--cidfile", "--publish", "--ipc", "--mount", "--env", "--entrypoint"),
        *("--pull", "--gpus", "--ulimit"),
    )
)
PERIOD_S = 0.02


def daemon(folder: Path) -> None:
    """Run what is asked for by files NAME.run; end it by NAME.stop; NAME.json says that it runs."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    (folder / "up").touch()
    while not select.select([0], [], [], PERIOD_S)[0]:
        for asked in folder.glob("*.run"):
            made = json.loads(asked.read_text())
            process = subprocess.Popen(made["words"], start_new_session=True, env=made["env"])
            running[asked.stem] = process
            state = {"id": made["id"], "pid": process.pid}
            (folder / "new").write_text(json.dumps(state))
            (folder / "new").rename(folder / f"{asked.stem}.json")
            asked.unlink()
        for name, process in list(running.items()):
            stop = folder / f"{name}.stop"
            if stop.exists():
                end(process, float(stop.read_text()))
                stop.unlink()
            if process.poll() is not None:
                (folder / f"{name}.json").unlink()  # --rm
                del running[name]
    for process in running.values():
        end(process, 0.0)


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s / 20)
    process.kill()
    process.wait()


def find(folder: Path, container: str) -> Path | None:
    """The file of a running container, by its name or its id."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            if container in (path.stem, json.loads(path.read_text())["id"]):
                return path
    return None


def client(folder: Path, words: list[str]) -> int:
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    verb, rest = words[0], words[1:]
    if verb == "version":
        return 0
    if verb == "image":
        return 0 if not (folder / "no_image").exists() else 1
    if verb == "pull":
        return 0 if not (folder / "no_registry").exists() else 1
    if verb == "run":
        return run(folder, rest)
    path = find(folder, rest[-1])
    if path is None:
        sys.stderr.write(f"Error: No such container: {rest[-1]}\n")
        return 1
    if verb == "inspect":
        made = json.loads(path.read_text())
        values = {"Running": "true", "Pid": str(made["pid"]), "Id": made["id"]}
        text = rest[rest.index("--format") + 1]
        for name, value in values.items():
            text = text.replace(f"{{{{.State.{name}}}}}", value).replace(f"{{{{.{name}}}}}", value)
        sys.stdout.write(text + "\n")
        return 0
    path.with_suffix(".stop").write_text(rest[1] if verb == "stop" else "0")
    while path.exists():
        time.sleep(PERIOD_S)
    return 0


def run(folder: Path, words: list[str]) -> int:
    options: dict[str, str] = {}
    while words[0].startswith("-"):
        option = words.pop(0)
        options[option] = words.pop(0) if option in WITH_VALUE else ""
    if (folder / "refuses").exists():
        sys.stderr.write("docker: Error response from daemon: port is already allocated.\n")
        return 125
    while (folder / "slow").exists():
        time.sleep(PERIOD_S)
    name, container = options["--name"], uuid.uuid4().hex * 2
    asked = folder / f"{name}.new"
    asked.write_text(json.dumps({"words": words[1:], "env": dict(os.environ), "id": container}))
    asked.rename(folder / f"{name}.run")
    state = folder / f"{name}.json"
    while not state.exists():
        time.sleep(PERIOD_S)
    if not (folder / "no_cid").exists():
        Path(options["--cidfile"]).write_text(container)
    signal.signal(signal.SIGTERM, lambda *_: state.with_suffix(".stop").write_text("10"))
    while state.exists():
        time.sleep(PERIOD_S)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["daemon"]:
        daemon(Path(sys.argv[2]))
    else:
        sys.exit(client(Path(sys.argv[0]).parents[1], sys.argv[1:]))
