"""An engine in a container is run by digest, and ended by its id, whoever dies first."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.engines import container
from headway.engines.launch import Endpoint, LaunchError, LaunchSpec, launched, port_owners
from headway.engines.servers import launcher_of
from headway.engines.supervise import descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
STUB = Path(__file__).with_name("container_stub.py")
IMAGE = f"some/image@sha256:{'0123456789abcdef' * 4}"
SERVER = """
import http.server, json, signal, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "what it is called in there"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spec(folder: Path, **changes: Any) -> LaunchSpec:
    words = [sys.executable, "-c", SERVER, "{port}", "gentle"]
    fields: dict[str, Any] = {"instance": "boxed", "kind": "image", "image": IMAGE}
    fields |= {"model": {"name": "m", "path": str(folder / "weights")}, "device": "cpu"}
    fields |= {"dtype": "float32", "python": Path("python3"), "log": folder / "boxed.log"}
    return LaunchSpec(**(fields | {"args": {"command": words}, "start_timeout_s": 20.0} | changes))


def until(true: Callable[[], object], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to hear of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def port_of(endpoint: Endpoint) -> int:
    return urlsplit(endpoint.base_url).port or 0


@dataclass
class Docker:
    """A folder that says what runs, how the client is to behave, and what it was called with."""

    folder: Path

    def running(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.folder.glob("*.json")]

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words[0] == verb]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    """A docker of ours on the PATH, with its daemon."""
    folder = tmp_path / "docker"
    (folder / "bin").mkdir(parents=True)
    client = folder / "bin" / "docker"
    client.write_text(f"#!{sys.executable}\n{STUB.read_text()}")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    command = [sys.executable, str(STUB), "daemon", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as daemon:
        assert until((folder / "up").exists)
        yield Docker(folder)
        assert daemon.stdin is not None
        daemon.stdin.close()
        daemon.wait(10)


def test_it_is_ready_and_leaves_nothing(docker: Docker, tmp_path: Path) -> None:
    with launched(spec(tmp_path)) as endpoint:
        (made,) = docker.running()
        assert endpoint.alive()
        assert endpoint.serves()
        assert endpoint.served_name == "what it is called in there"
        assert port_owners(port_of(endpoint)) == {made["pid"]}
        assert (tmp_path / "boxed.cid").read_text() == made["id"]
    assert docker.running() == []
    assert port_owners(port_of(endpoint)) == set()
    assert [words[-1] for words in docker.calls("stop")] == [made["id"]]
    assert all(owns(pid, STUB) for pid in descendants(os.getpid()))


def owns(pid: int, script: Path) -> bool:
    return str(script) in Path(f"/proc/{pid}/cmdline").read_text()


OWNER = """
import json, sys, time
from pathlib import Path
from headway.engines.launch import LaunchSpec, launched
fields = json.loads(sys.argv[1])
paths = {name: Path(fields.pop(name)) for name in ("python", "log")}
with launched(LaunchSpec(**fields, **paths)) as endpoint:
    print(endpoint.base_url, endpoint._supervisor.pid, flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def owner(asked: LaunchSpec) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Another process that launches; yields it, the port, and its supervisor's pid."""
    names = ("instance", "kind", "image", "model", "dtype", "device", "args", "start_timeout_s")
    fields = {name: getattr(asked, name) for name in names}
    fields |= {"python": str(asked.python), "log": str(asked.log)}
    command = [sys.executable, "-c", OWNER, json.dumps(fields)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        base_url, _, pid = process.stdout.readline().strip().partition(" ")
        try:
            yield process, urlsplit(base_url).port or 0, int(pid)
        finally:
            process.kill()


@pytest.mark.parametrize("manner", ["gentle", "stubborn"])
@pytest.mark.parametrize("dies", ["the owner", "the client", "the supervisor is asked to"])
def test_whoever_dies_the_container_is_ended(
    docker: Docker, tmp_path: Path, dies: str, manner: str
) -> None:
    words = [sys.executable, "-c", SERVER, "{port}", manner]
    with owner(spec(tmp_path, args={"command": words})) as (process, port, supervisor):
        (made,) = docker.running()
        if dies == "the owner":
            process.kill()
        elif dies == "the client":
            (client,) = [pid for pid in descendants(supervisor) if owns(pid, docker.folder)]
            os.kill(client, signal.SIGKILL)
        else:
            os.kill(supervisor, signal.SIGTERM)
        assert until(lambda: not docker.running())
        assert until(lambda: ended(supervisor))
    assert port_owners(port) == set()
    assert not Path(f"/proc/{made['pid']}").exists()


def test_a_container_outlives_its_client(docker: Docker, tmp_path: Path) -> None:
    """The proof that the test above can fail: nobody ends this one."""
    words = words_of(tmp_path, "docker", spec(tmp_path))
    with subprocess.Popen(words) as client:
        assert until(docker.running)
        client.kill()
    time.sleep(0.2)
    assert len(docker.running()) == 1


def test_without_its_id_it_is_ended_by_the_name_we_gave_it(docker: Docker, tmp_path: Path) -> None:
    """A client that died before it wrote the id down."""
    (docker.folder / "no_cid").touch()
    with launched(spec(tmp_path)):
        (name,) = [path.stem for path in docker.folder.glob("*.json")]
    assert docker.running() == []
    assert [words[-1] for words in docker.calls("stop")] == [name]


def test_a_container_that_is_refused_says_why(docker: Docker, tmp_path: Path) -> None:
    (docker.folder / "refuses").touch()
    with pytest.raises(LaunchError, match="port is already allocated") as caught:
        with launched(spec(tmp_path)):
            pass
    assert caught.value.kind == "died_loading"


def test_a_stranger_that_answers_for_a_slow_container_is_never_measured(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docker.folder / "slow").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("headway.engines.launch._choose_port", lambda _: port)
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port), "gentle"]) as stranger:
        try:
            with pytest.raises(LaunchError, match="not by its container") as caught:
                with launched(spec(tmp_path)):
                    pass
        finally:
            stranger.kill()
    assert caught.value.kind == "stranger"


def test_an_image_that_is_not_here_is_fetched_before_the_clock_runs(
    docker: Docker, tmp_path: Path
) -> None:
    (docker.folder / "no_image").touch()
    with launched(spec(tmp_path)):
        pass
    assert docker.calls("pull") == [["pull", IMAGE]]
    (docker.folder / "no_registry").touch()
    with pytest.raises(LaunchError, match=f"docker pull {IMAGE} gave 1") as caught:
        with launched(spec(tmp_path)):
            pass
    assert caught.value.kind == "no_image"


def test_a_machine_without_a_client_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="neither docker nor podman answers here"):
        with launched(spec(tmp_path)):
            pass


def words_of(tmp_path: Path, client: str, asked: LaunchSpec) -> list[str]:
    box = container.Container(client, "headway-x", tmp_path / "x.cid")
    return container.command(box, asked, launcher_of(asked.kind, asked.args), 8123, asked.env)


def values(words: list[str], flag: str) -> list[str]:
    return [value for name, value in itertools.pairwise(words) if name == flag]


def test_a_kinds_own_command_runs_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    asked = spec(tmp_path, kind="sglang", args={}, device="cuda", env={"HF_TOKEN": "secret"})
    words = words_of(tmp_path, "docker", asked)
    at = words.index(IMAGE)
    before, after = words[:at], words[at + 1 :]
    assert values(before, "--entrypoint") == ["python3"]
    assert after[:2] == ["-m", "sglang.launch_server"]
    assert values(after, "--model-path") == ["/headway/models/weights"]
    assert values(after, "--host") == ["0.0.0.0"]  # inside; outside its port is on loopback
    assert values(before, "--publish") == ["127.0.0.1:8123:8123"]
    kept = tmp_path / "home" / "images" / "0123456789abcdef"
    assert values(before, "--mount") == [
        f"type=bind,source={kept},target=/headway/cache",
        f"type=bind,source={tmp_path / 'weights'},target=/headway/models/weights,readonly",
    ]
    assert kept.is_dir()
    assert values(before, "--gpus") == ["all"]
    assert "HF_TOKEN" in values(before, "--env")
    assert "secret" not in " ".join(words)
    assert not {"--privileged", "--detach", "-d"} & set(words)
    assert {"--rm", "--init"} <= set(before)


@pytest.mark.parametrize(
    ("client", "flags"),
    [
        ("docker", ["--gpus", '"device=0,GPU-1"']),
        ("podman", ["--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=GPU-1"]),
    ],
)
def test_gpus_are_named_as_each_client_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str, flags: list[str]
) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    asked = spec(tmp_path, device="cuda", gpus=("0", "GPU-1"))
    text = " ".join(words_of(tmp_path, client, asked))
    assert " ".join(flags) in text
    assert "--gpus" not in " ".join(words_of(tmp_path, client, spec(tmp_path)))


def test_what_a_server_knows_as_a_file_is_in_the_container_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    asked = spec(tmp_path, kind="tensorrt_llm", args={})
    asked.config.write_text("{}")
    words = words_of(tmp_path, "docker", asked)
    (there,) = values(words, "--extra_llm_api_options")
    assert f"type=bind,source={asked.config},target={there},readonly" in values(words, "--mount")
    assert values(words, "--ulimit") == ["memlock=-1", "stack=67108864"]
    assert values(words, "--entrypoint") == ["trtllm-serve"]


# A sandbox may keep even root from raising limits, as every container otherwise does at its start.
RUNTIME = """#!{python}
import json, os, sys
words = sys.argv[1:]
if "--bundle" in words:
    path = words[words.index("--bundle") + 1] + "/config.json"
    config = json.load(open(path))
    config["process"]["rlimits"] = []
    json.dump(config, open(path, "w"))
os.execv({runc!r}, [{runc!r}, *words])
"""


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real podman with an image of busybox and two files; returns the image by its digest."""
    if container._works("docker"):
        pytest.skip("a docker works here, and is asked first")
    found = {name: shutil.which(name) for name in ("podman", "runc", "busybox")}
    lacks = [name for name, path in found.items() if path is None]
    if lacks:
        pytest.skip(f"{', '.join(lacks)} not here")
    root = tmp_path / "root"
    (root / "www" / "v1").mkdir(parents=True)
    shutil.copy(found["busybox"] or "", root / "busybox")
    (root / "www" / "health").touch()
    (root / "www" / "v1" / "models").write_text('{"data": [{"id": "boxed"}]}')
    runtime = tmp_path / "runtime"
    runtime.write_text(RUNTIME.format(python=sys.executable, runc=found["runc"]))
    runtime.chmod(0o755)
    conf, storage = tmp_path / "containers.conf", tmp_path / "storage.conf"
    conf.write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'[engine.runtimes]\nrunc = ["{runtime}"]\n'
    )
    where = f'graphroot = "{tmp_path / "graph"}"\nrunroot = "{tmp_path / "run"}"\n'
    storage.write_text(f'[storage]\ndriver = "vfs"\n{where}')
    monkeypatch.setenv("CONTAINERS_CONF", str(conf))
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    tar = tmp_path / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True)
    entry = 'ENTRYPOINT ["/busybox"]'
    made = ["podman", "import", "--quiet", "--change", entry, str(tar), "headway-boxed"]
    tried = subprocess.run(made, capture_output=True, text=True, timeout=60)
    if tried.returncode == 0:
        one = ["podman", "run", "--rm", "--init", "headway-boxed", "true"]
        tried = subprocess.run(one, capture_output=True, text=True, timeout=60)
    if tried.returncode != 0:
        pytest.skip(f"podman runs nothing here: {tried.stderr.strip()[-200:]}")
    ask = ["podman", "image", "inspect", "--format", "{{index .RepoDigests 0}}", "headway-boxed"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def podman_has() -> list[str]:
    answer = subprocess.run(["podman", "ps", "-aq"], capture_output=True, text=True, check=True)
    return answer.stdout.split()


@pytest.mark.slow
def test_a_real_container_lives_and_ends(podman: str, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    words = ["httpd", "-f", "-p", "{port}", "-h", "/www"]
    asked = spec(tmp_path, image=podman, args={"command": words})
    with launched(asked) as endpoint:
        assert endpoint.served_name == "boxed"
        pids = endpoint.pids()
        assert any("httpd" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
        assert (endpoint.peak_rss_bytes() or 0) > 1 << 16
        assert len(podman_has()) == 1
    assert podman_has() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    for dies in ("owner", "client"):
        with owner(asked) as (process, port, supervisor):
            assert len(podman_has()) == 1
            if dies == "owner":
                process.kill()
            else:
                os.kill(descendants(supervisor)[0], signal.SIGKILL)
            assert until(lambda: not podman_has(), 40.0)
        with socket.socket() as again:
            assert again.connect_ex(("127.0.0.1", port)) != 0
