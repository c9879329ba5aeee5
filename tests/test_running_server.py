"""Kind http: a server that ran before we came, wherever it is and whatever it calls its model."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import loadgen, metrics, transport, verdict
from headway.core import COMPLETIONS, Level, Request
from headway.engines.launch import LaunchError, LaunchSpec, launched
from headway.transport import Target

NAME = "org/Model-1B"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class Server(http.server.ThreadingHTTPServer):
    """Lists models (None: it does not know that path), streams three pieces, keeps what it saw."""

    daemon_threads = True

    def __init__(self, models: list[str] | None, key: str | None, host: str, prefix: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.models, self.key, self.prefix = models, key, prefix
        self.seen = list[dict[str, Any]]()
        super().__init__((host, 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refused(self) -> bool:
        wanted = self.server.key
        if wanted is None or self.headers["Authorization"] == f"Bearer {wanted}":
            return False
        self.answer(401, b"{}")
        return True

    def do_GET(self) -> None:
        if self.refused():
            return
        models = self.server.models
        if self.path == f"{self.server.prefix}/v1/models" and models is not None:
            self.answer(200, json.dumps({"data": [{"id": name} for name in models]}).encode())
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        self.server.seen.append({"path": self.path, **asked})
        pieces = [{"choices": [{"index": 0, "text": text}]} for text in (" a", " b", " c")]
        pieces[-1]["choices"][0]["finish_reason"] = "length"
        usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in [*pieces, usage]]
        self.answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def running(
    models: list[str] | None, *, key: str | None = None, host: str = "127.0.0.1", prefix: str = ""
) -> Iterator[Server]:
    server = Server(models, key, host, prefix)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spec(tmp_path: Path, base_url: str, **changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {"instance": "there", "kind": "http", "model": {"name": NAME}}
    fields |= {"dtype": "float32", "device": "cpu", "python": Path(sys.executable)}
    fields |= {"log": tmp_path / "a.log", "base_url": base_url, "start_timeout_s": 5.0}
    return LaunchSpec(**(fields | changes))


def served(asked: LaunchSpec) -> tuple[str, list[bool]]:
    """What the model is called there, and whether each of two requests was answered."""
    with launched(asked) as there:
        to = loadgen.Recipient(
            Target.parse(there.base_url), there.served_name, there.launcher.can, asked.api_key
        )
        requests = tuple(Request(n, (1, 2), 3, texts=("hello",)) for n in range(2))
        level = Level("c1", 2, concurrency=1)
        measured = transport.run(loadgen.measure(loadgen.Share(to, requests, level)))
        assert there.serves()
        assert there.pids() == []
        assert there.peak_rss_bytes() is None
        return there.served_name, [record.completed for record in measured.records]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("proxies", [PROXIES[:3], PROXIES[3:]], ids=["upper", "lower"])
def test_no_proxy_stands_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, proxies: tuple[str, ...]
) -> None:
    """Case 33: where the proxy would be, nothing listens."""
    for name in (*PROXIES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in proxies:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    address = "127.0.0.1" if host == "localhost" else host.strip("[]")
    with running([NAME], host=address) as server:
        asked = spec(tmp_path, f"http://{host}:{server.server_port}")
        assert served(asked) == (NAME, [True, True])
    assert os.environ[proxies[0]] == "http://127.0.0.1:9"


def test_where_proxies_are_honoured_the_same_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that the test above can fail: urllib goes through the proxy that is not there."""
    import urllib.error
    import urllib.request

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with running([NAME]) as server, pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/v1/models", timeout=5)


@pytest.mark.parametrize(
    ("models", "args", "called"),
    [
        ([NAME], {}, NAME),
        (["some-other-name"], {}, "some-other-name"),
        (["a", NAME], {}, NAME),
        (["a", "b"], {"served_model": "b"}, "b"),
        (None, {}, NAME),
        (None, {"served_model": "b"}, "b"),
    ],
)
def test_the_model_goes_by_the_name_that_the_server_has_for_it(
    tmp_path: Path, models: list[str] | None, args: dict[str, str], called: str
) -> None:
    with running(models) as server:
        asked = spec(tmp_path, f"http://127.0.0.1:{server.server_port}/", args=args)
        assert served(asked) == (called, [True, True])
    assert [one["model"] for one in server.seen] == [called] * 2
    assert [one["path"] for one in server.seen] == [COMPLETIONS] * 2


@pytest.mark.parametrize(
    ("models", "args", "message"),
    [
        (["a", "b"], {}, f"there serves a, b, not {NAME}; args.served_model says which"),
        (["a"], {"served_model": "b"}, "there serves a, not b; args.served_model says which"),
        ([], {}, f"there serves nothing, not {NAME}"),
    ],
)
def test_a_model_that_is_not_there_is_said_with_those_that_are(
    tmp_path: Path, models: list[str], args: dict[str, str], message: str
) -> None:
    with running(models) as server, pytest.raises(LaunchError, match=message) as caught:
        served(spec(tmp_path, f"http://127.0.0.1:{server.server_port}", args=args))
    assert caught.value.kind == "wrong_model"


def test_a_key_goes_with_the_look_and_with_every_request(tmp_path: Path) -> None:
    with running([NAME], key="sesame") as server:
        base_url = f"http://127.0.0.1:{server.server_port}"
        assert served(spec(tmp_path, base_url, api_key="sesame")) == (NAME, [True, True])
        with pytest.raises(LaunchError, match="answered 401: api_key_env names") as caught:
            served(spec(tmp_path, base_url))
    assert caught.value.kind == "no_api_key"


def test_nobody_there_is_said_in_time(tmp_path: Path) -> None:
    base_url = "http://127.0.0.1:9"
    with pytest.raises(LaunchError, match=f"not ready after 0.3 s: it is to be at {base_url}"):
        served(spec(tmp_path, base_url, start_timeout_s=0.3))


def test_a_server_under_a_path_is_asked_there(tmp_path: Path) -> None:
    with running([NAME], prefix="/api") as server:
        base_url = f"http://127.0.0.1:{server.server_port}/api"
        assert served(spec(tmp_path, base_url)) == (NAME, [True, True])
    assert [one["path"] for one in server.seen] == [f"/api{COMPLETIONS}"] * 2


@pytest.mark.parametrize("kind", ["http", "fake"])
def test_what_nobody_here_can_measure_is_not_judged(factory: Any, kind: str) -> None:
    """Its launch time and memory are undefined, with a reason, and fail nothing."""
    made = factory.make_night()
    own = dataclasses.replace(made.suite.instance("b"), kind=kind, base_url="http://h:1")
    suite = dataclasses.replace(made.suite, instances=(made.suite.instance("a"), own))
    runs = tuple(
        dataclasses.replace(run, engine={}) if run.case.instance == "b" else run
        for run in made.runs
    )
    launches = tuple(
        dataclasses.replace(one, launch_s=None) if one.instance == "b" else one
        for one in made.launches
    )
    results = dataclasses.replace(made, suite=suite, runs=runs, launches=launches)
    cells = {
        (c.case.name, c.metric): c for c in verdict.judge(results, verdict.Memory(lambda _: None))
    }
    mine = {key: cells[key] for key in cells if key[1] in metrics.OF_PROCESSES}
    assert {c.verdict for (name, _), c in mine.items() if name.startswith("a")} == {"PASS"}
    (launch,) = [c for (name, metric), c in mine.items() if name == "b"]
    memory = [c for (name, _), c in mine.items() if name.startswith("b-")]
    assert len(memory) == 2
    if kind == "fake":  # ours, and seen from here: what is missing is missing
        assert launch.verdict == "MISSING"
        return
    for cell in (launch, *memory):
        assert (cell.verdict, cell.value) == ("SKIPPED", None)
        assert cell.findings[0].reason.startswith("b ran before we came")
    assert cells["b-w32_16-c4", "output_throughput"].verdict not in verdict.FAILS
