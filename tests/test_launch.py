"""Life and death of engine processes: ready only when it is ours, and nothing left behind."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headway.engines.endpoint import Endpoint
from headway.engines.fake import MODEL
from headway.engines.launch import HERE, LaunchError, LaunchSpec, launched, port_owners
from headway.engines.servers import launcher_of
from headway.engines.supervise import descendants

SUPERVISE = Path(__file__).parents[1] / "engines" / "supervise.py"


def spec(tmp_path: Path, **changes: object) -> LaunchSpec:
    fields: dict[str, object] = {
        "instance": "fake_a",
        "kind": "fake",
        "model": MODEL,
        "dtype": "float32",
        "device": "cpu",
        "python": Path(sys.executable),
        "log": tmp_path / "engine.log",
        "args": {"ttft_s": 0.001, "itl_s": 0.001},
        "start_timeout_s": 20.0,
    }
    return LaunchSpec(**(fields | changes))  # type: ignore[arg-type]


def gone(pid: int, timeout_s: float = 15.0) -> bool:
    """Whether a process ends, seen from outside; a zombie of a stranger's counts as ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def stranger(status: int = 200) -> Iterator[int]:
    """A server of somebody else's that answers /health, and lists the very model asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": MODEL["name"]}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_engine_is_ready_and_leaves_nothing(tmp_path: Path) -> None:
    with launched(spec(tmp_path)) as endpoint:
        pids = endpoint.pids()
        assert endpoint.alive()
        assert endpoint.info().kind == "fake"
        assert (endpoint.peak_rss_bytes() or 0) > 1 << 20
        port = urlsplit(endpoint.base_url).port
        assert port_owners(port) & set(pids)
    assert pids
    assert all(gone(pid) for pid in pids)
    assert port_owners(port) == set()


def test_one_that_answers_wrongly_because_it_is_dying_has_died(tmp_path: Path) -> None:
    """Of a server of several processes one was killed: the other answers 500, and ends then."""
    asked = spec(tmp_path)
    asked.log.write_text("the engine core is gone\n")
    for dies, kind in ((True, "died_loading"), (False, "no_info")):
        words = ["sleep", "0.5" if dies else "600"]
        with stranger(status=500) as port, subprocess.Popen(words) as process:
            url = f"http://127.0.0.1:{port}"
            endpoint = Endpoint(asked, launcher_of("fake"), url, process, time.monotonic())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("headway.engines.endpoint.PARTING_S", 10.0 if dies else 0.1)
                with pytest.raises(LaunchError) as caught:
                    endpoint.info()
            process.kill()
        assert caught.value.kind == kind
    assert "answered 500" in str(caught.value)


def test_a_port_in_use_fails_before_the_launch(tmp_path: Path) -> None:
    """The suite's own port is taken: nothing is started."""
    with stranger() as port, pytest.raises(LaunchError) as caught:
        with launched(spec(tmp_path, port=port)):
            pass
    assert caught.value.kind == "port_in_use"
    assert str(port) in str(caught.value)
    assert not (tmp_path / "engine.log").exists()


def beside(port: int, monkeypatch: pytest.MonkeyPatch, launch: LaunchSpec) -> LaunchError:
    """Launch on a port that was free when we asked, and that a stranger has taken since."""
    monkeypatch.setattr("headway.engines.launch._choose_port", lambda _: port)
    with pytest.raises(LaunchError) as caught, launched(launch):
        pass
    assert descendants(os.getpid()) == []
    return caught.value


def test_a_stranger_that_answers_for_a_slow_engine_is_never_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours lives and has not come to its port yet, while a stranger there says it is ready."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    with stranger() as port:
        error = beside(port, monkeypatch, spec(tmp_path, python=slow))
    assert error.kind == "stranger"
    assert f"port {port} of fake_a is answered by process {os.getpid()}" in str(error)


def test_an_engine_whose_port_a_stranger_took_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours cannot bind its port, and ends; the stranger there never says that it is ready."""
    with stranger(status=503) as port:
        error = beside(port, monkeypatch, spec(tmp_path))
    assert error.kind == "died_loading"
    assert f"cannot listen on 127.0.0.1 port {port}" in str(error)


def test_a_stranger_that_is_ready_first_is_never_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once: whichever is seen first, it is said for what it is."""
    with stranger() as port:
        error = beside(port, monkeypatch, spec(tmp_path))
    reason = {
        "stranger": f"answered by process {os.getpid()}, which is not ours",
        "died_loading": f"cannot listen on 127.0.0.1 port {port}",
    }
    assert reason[error.kind] in str(error)


def test_the_wrong_model_is_named(tmp_path: Path) -> None:
    args = {"wrong_model": True}
    with pytest.raises(LaunchError, match="serves not_fake, not fake") as caught:
        with launched(spec(tmp_path, args=args)):
            pass
    assert caught.value.kind == "wrong_model"


def test_death_while_loading_quotes_the_log(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="planted death while loading") as caught:
        with launched(spec(tmp_path, args={"die_while_loading": True})):
            pass
    assert caught.value.kind == "died_loading"


def test_an_engine_that_is_never_ready_times_out(tmp_path: Path) -> None:
    hanging = spec(tmp_path, args={"hang_on_start": True}, start_timeout_s=1.0)
    with pytest.raises(LaunchError, match="not ready after 1 s") as caught, launched(hanging):
        pass
    assert caught.value.kind == "start_timeout"
    assert descendants(os.getpid()) == []


def test_a_python_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no-such-python cannot be started"):
        with launched(spec(tmp_path, python=Path("/no-such-python"))):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are found through /proc")
def test_what_a_killed_supervisor_left_is_ended(tmp_path: Path) -> None:
    """Its child dies with it, and what that has started, as vLLM its engine core, does not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep 600 &\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with launched(spec(tmp_path, python=python)) as endpoint:
        (supervisor,) = named(b"supervise.py", descendants(os.getpid()))
        (sleeper,) = named(b"sleep", endpoint.pids())
        os.kill(supervisor, signal.SIGKILL)
        assert endpoint.ends_within(10.0)
        assert not gone(sleeper, 0.2)
    assert gone(sleeper)


def named(word: bytes, pids: list[int]) -> list[int]:
    """Those of the processes that have a word in their command that ends so."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    return [pid for pid, words in commands.items() if any(w.endswith(word) for w in words)]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through /proc")
@pytest.mark.parametrize("end", ["owner closes", "owner is killed", "SIGTERM", "SIGKILL"])
def test_the_supervisor_leaves_nothing(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ignores SIGTERM, with a grandchild that left the process group."""
    quick = "import runpy, sys; m = runpy.run_path(sys.argv[1]); g = m['main'].__globals__;"
    code = f"{quick} g['GRACE_S'] = 0.5; sys.exit(m['main'](sys.argv[2:]))"
    command = [sys.executable, "-c", code, str(SUPERVISE), sys.executable, "-c", STUBBORN]
    owner = None
    if end == "owner is killed":
        relay = (
            f"import subprocess, sys; subprocess.Popen({command!r}, stdin=subprocess.PIPE).wait()"
        )
        owner = subprocess.Popen([sys.executable, "-c", relay], stdout=subprocess.PIPE, text=True)
        process = owner
    else:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    if end == "owner closes":
        assert process.stdin is not None
        process.stdin.close()
    else:
        process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
    child, grandchild = pids
    assert gone(child)
    if end == "SIGKILL":  # nobody is left to find what left the group: its parent's death must do
        os.kill(grandchild, signal.SIGKILL)
    assert gone(grandchild)
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


GENTLE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_what_is_stopped_ends_by_itself_when_it_is_asked_to() -> None:
    """Not killed after the grace period: the status is its own."""
    command = [sys.executable, str(SUPERVISE), sys.executable, "-c", GENTLE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGSTOP)
        process.stdin.close()
        assert process.wait(30) == 5


def test_the_supervisor_passes_the_status_on() -> None:
    for code, status in (
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ):
        command = [sys.executable, str(SUPERVISE), sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.wait(30) == status


def test_free_ports_are_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        assert os.getpid() in port_owners(probe.getsockname()[1])


def test_a_command_of_the_suites_own_lives_and_ends_like_any_engine(tmp_path: Path) -> None:
    words = [sys.executable, str(HERE / "boot.py"), "headway.engines.host", "fake"]
    words += ["--model-json", json.dumps(MODEL), "--served-name", "mine", "--port", "{port}"]
    words += ["--dtype", "{dtype}", "--device", "{device}", "--args", "{}"]
    with launched(spec(tmp_path, kind="command", args={"command": words})) as endpoint:
        pids = endpoint.pids()
        assert endpoint.served_name == "mine"
        assert endpoint.serves()
        assert port_owners(urlsplit(endpoint.base_url).port or 0) & set(pids)
    assert pids
    assert all(gone(pid) for pid in pids)


def test_a_command_that_ends_by_itself_is_no_engine(tmp_path: Path) -> None:
    args = {"command": ["true"], "served_model": "mine"}
    with pytest.raises(LaunchError, match="ended while it was loading"):
        with launched(spec(tmp_path, kind="command", args=args)):
            pass
