"""The host for real: processes, sockets, the official client. Times are not looked at."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.engines import boot
from headway.engines.fake import fake_tokens

QUICK = {"ttft_s": 0.002, "itl_s": 0.001}
STALLED = {**QUICK, "stall_request": 1}
STREAM_END = b"0\r\n\r\n"

STEP_ENGINE = '''
import asyncio
import os
from headway.core import EngineInfo
from headway.engines.contract import Output

class Counter:
    """Counts up from the prompt's last id; some ids make it fail."""
    def __init__(self, folder, dtype, device, die=False):
        if die:
            raise MemoryError("no room for the weights")
        self.info = EngineInfo("counter", "1", folder.name, dtype, device, {"pid": os.getpid()})
        self.open = {}
    def add(self, submission):
        if 901 in submission.prompt_token_ids:
            raise ValueError("901 is not to my taste")
        self.open[submission.id] = [submission, 0]
    def abort(self, id):
        self.open.pop(id, None)
    def has_work(self):
        return bool(self.open)
    def step(self):
        outputs = []
        for id, entry in list(self.open.items()):
            submission, n = entry
            if 900 in submission.prompt_token_ids and n == 2:
                raise ArithmeticError("the cache is on fire")
            if 902 in submission.prompt_token_ids and n == 2:
                continue
            entry[1] += 1
            token = (submission.prompt_token_ids[-1] + n) % 900
            last = entry[1] == submission.max_tokens
            outputs.append(Output(id, (token,), "length" if last else None))
            if last:
                del self.open[id]
        return outputs
    def time_step(self, phase, batch, length):
        if batch > 4:
            raise ValueError("batch must be at most 4")
        return batch * 0.5
    def stats(self):
        return {"running": len(self.open), "waiting": 0, "steps_total": 5}

class AsyncCounter:
    """The same, working by itself; what it says it found cached is the length of the salt."""
    def __init__(self, folder, dtype, device, die=False, refuse=False):
        self.die, self.refuse = die, refuse
        self.info = EngineInfo("counter", "1", folder.name, dtype, device, {"pid": os.getpid()})
        self.running = 0
        self.dead = asyncio.Event()
    async def start(self):
        if self.die:
            raise MemoryError("no room for the weights")
        if self.refuse:
            raise ValueError("counting is not for everyone")
        return self.info
    async def generate(self, submission):
        if 901 in submission.prompt_token_ids:
            raise ValueError("901 is not to my taste")
        self.running += 1
        try:
            for n in range(submission.max_tokens):
                await asyncio.sleep(0.001)
                if n == 2 and 900 in submission.prompt_token_ids:
                    raise ArithmeticError("the cache is on fire")
                if n == 2 and 902 in submission.prompt_token_ids:
                    await asyncio.Event().wait()
                if n == 2 and 903 in submission.prompt_token_ids:
                    self.dead.set()
                token = (submission.prompt_token_ids[-1] + n) % 900
                reason = "length" if n + 1 == submission.max_tokens else None
                cached = len(submission.salt) if reason and submission.salt else None
                yield Output(submission.id, (token,), reason, cached=cached)
        finally:
            self.running -= 1
    async def ended(self):
        await self.dead.wait()
        return "the cache has left"
    async def stats(self):
        return {"running": self.running, "waiting": 0, "steps_total": 5}
    async def close(self):
        assert not self.running  # everyone was let go first
'''


class Host:
    """A host process; `url` answers, `wait_until_ready` says when it serves."""

    def __init__(self, kind: str, args: dict[str, object], cwd: Path, *options: str) -> None:
        command = [sys.executable, boot.__file__, "headway.engines.host", kind, "--port", "0"]
        command += ["--args", json.dumps(args), "--served-name", "m", *options]
        self.log = (cwd / "stderr").open("w+b")
        self.process = subprocess.Popen(command, cwd=cwd, stderr=self.log)
        found = eventually(lambda: re.search(r"http://127.0.0.1:(\d+)", self.stderr()))
        self.port = int(found[1])
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="x", max_retries=0
        )

    def stderr(self) -> str:
        return Path(self.log.name).read_text("utf-8")

    def ask(self, path: str, body: object = None) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request on its own connection: status, JSON or text, headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(text) if is_json else text, answer.headers

    def metric(self, name: str) -> float:
        _, text, _ = self.ask("/metrics")
        found = re.search(rf"^headway:{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def wait_until_ready(self) -> Host:
        eventually(lambda: self.ask("/health")[0] == 200)
        return self

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def stop(self) -> int:
        self.client.close()
        self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.log.close()


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true value of `condition`; fails after long enough for any machine."""
    for _ in range(1500):
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail("it did not happen in 30 seconds")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host("fake", QUICK, tmp_path_factory.mktemp("fake"), "--max-body-bytes", "100000")
    yield host.wait_until_ready()
    assert host.stop() == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Start hosts; each is ended after the test, whatever became of it."""
    hosts: list[Host] = []
    (tmp_path / "step_engine.py").write_text(STEP_ENGINE, "utf-8")

    def start(kind: str, args: dict[str, object], *options: str) -> Host:
        hosts.append(Host(kind, args, tmp_path, *options))
        return hosts[-1]

    yield start
    for host in hosts:
        host.stop()


@pytest.fixture(params=["Counter", "AsyncCounter"])
def counter(request: pytest.FixtureRequest, start: Callable[..., Host]) -> Host:
    """An engine of one's own: one that is stepped, and one that works by itself."""
    return start(f"step_engine:{request.param}", {}).wait_until_ready()


@pytest.fixture
def stepped(start: Callable[..., Host]) -> Host:
    return start("step_engine:Counter", {}).wait_until_ready()


@pytest.fixture
def working(start: Callable[..., Host]) -> Host:
    return start("step_engine:AsyncCounter", {}).wait_until_ready()


def body(**fields: object) -> dict[str, object]:
    return {"model": "m", "prompt": [11, 12], "max_tokens": 5, **fields}


def http_request(content: dict[str, object], *headers: str) -> bytes:
    text = json.dumps(content).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(text)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + text


def read_to(sock: socket.socket, end: bytes) -> bytes:
    """Read until `end` was read or the peer closed."""
    data = b""
    while end not in data and (more := sock.recv(65536)):
        data += more
    return data


def text_of(ids: list[int]) -> str:
    return "".join(f"<{id}>" for id in ids)


# The official client.


def test_a_completion(fake: Host) -> None:
    answer = fake.client.completions.create(
        model="m", prompt=[11, 12], max_tokens=5, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == text_of(fake_tokens([11, 12], 5))
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].token_ids == fake_tokens([11, 12], 5)
    assert answer.choices[0].prompt_token_ids == [11, 12]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)


def test_a_streamed_completion(fake: Host) -> None:
    chunks = list(
        fake.client.completions.create(
            model="m",
            prompt="<11><12>",
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    )
    *token_chunks, usage = chunks
    ids = [chunk.choices[0].token_ids for chunk in token_chunks]
    assert ids == [[token] for token in fake_tokens([11, 12], 5)]
    assert "".join(chunk.choices[0].text for chunk in token_chunks) == text_of(
        fake_tokens([11, 12], 5)
    )
    reasons = [chunk.choices[0].finish_reason for chunk in token_chunks]
    assert reasons == [None] * 4 + ["length"]
    assert token_chunks[0].choices[0].prompt_token_ids == [11, 12]
    assert all(chunk.usage is None for chunk in token_chunks)
    assert usage.choices == []
    assert usage.usage.completion_tokens == 5


def test_a_chat(fake: Host) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = fake.client.chat.completions.create(model="m", messages=messages, max_tokens=3)
    assert answer.choices[0].message.role == "assistant"
    chunks = list(
        fake.client.chat.completions.create(
            model="m", messages=messages, max_completion_tokens=3, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 1]
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    streamed = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert streamed == answer.choices[0].message.content != ""


def test_the_model_is_listed_and_no_other_is_served(fake: Host) -> None:
    assert [model.id for model in fake.client.models.list()] == ["m"]
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; 'm' is"):
        fake.client.completions.create(model="other", prompt="x")


def test_stop_strings_end_the_answer_and_the_work(fake: Host) -> None:
    tokens = fake_tokens([11, 12], 200)
    stop = text_of(tokens[3:5])[2:-2]  # begins and ends within tokens
    before = text_of(tokens).split(stop)[0]
    for stream in (False, True):
        status, answer, _ = fake.ask(
            "/v1/completions", body(stop=[stop, "never"], max_tokens=100_000, stream=stream)
        )
        assert status == 200
        if stream:
            chunks = [json.loads(line[6:]) for line in answer.splitlines() if line[6:7] == "{"]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            choice = chunks[-1]["choices"][0]
        else:
            choice = answer["choices"][0]
            text = choice["text"]
        assert text == before
        assert choice["finish_reason"] == "stop"
    eventually(lambda: fake.metric("num_requests_running") == 0)


def test_stamps_are_the_engines_own(fake: Host) -> None:
    _, text, _ = fake.ask("/v1/completions", body(stream=True))
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line[6:7] == "{"]
    number = int(chunks[0]["id"].split("-")[1])
    [truth] = [one for one in fake.ask("/headway/truth")[1]["requests"] if one["id"] == number]
    assert [chunk["headway"]["at_s"] for chunk in chunks] == truth["departed_s"]
    assert {chunk["headway"]["arrived_s"] for chunk in chunks} == {truth["arrived_s"]}


def test_what_does_not_fit_the_context_is_refused_with_the_numbers(fake: Host) -> None:
    status, answer, _ = fake.ask("/v1/completions", body(max_tokens=1 << 20))
    assert status == 400
    assert re.search("2 prompt tokens .* 1048576 .* 1048576", answer["error"]["message"])
    status, answer, _ = fake.ask("/v1/completions", body(prompt=[1000]))
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert fake.ask("/v1/completions", body(prompt=[]))[0] == 400


def test_an_unknown_field_is_refused(fake: Host) -> None:
    with pytest.raises(openai.BadRequestError, match=r"unknown field .*ignore_oes"):
        fake.client.completions.create(model="m", prompt="x", extra_body={"ignore_oes": True})


def test_an_unknown_path_or_method(fake: Host) -> None:
    assert fake.ask("/v1/embeddings", {})[0] == 404
    status, _, headers = fake.ask("/v1/completions")
    assert (status, headers["Allow"]) == (405, "POST")


# Raw sockets.


def test_connections_are_kept_and_requests_may_be_pipelined(fake: Host) -> None:
    with fake.raw() as sock:
        for _ in range(2):
            sock.sendall(http_request(body(stream=True)))
            assert read_to(sock, STREAM_END).count(b"data: ") == 6
        sock.sendall(http_request(body(max_tokens=2)) + http_request(body(max_tokens=1)))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = read_to(sock, b"no such end")
    assert [int(n) for n in re.findall(rb'"completion_tokens":(\d)', data)] == [2, 1]
    assert data.endswith(b'{"status": "ready"}')
    assert data.count(b"Connection: close") == 1


def test_before_http_1_1_a_stream_ends_with_its_connection(fake: Host) -> None:
    with fake.raw() as sock:
        sock.sendall(http_request(body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        data = read_to(sock, b"no such end")
    assert b"chunked" not in data
    assert data.endswith(b"data: [DONE]\n\n")


def test_an_upgrade_is_not_taken(fake: Host) -> None:
    with fake.raw() as sock:
        sock.sendall(http_request(body(), "Connection: Upgrade", "Upgrade: h2c"))
        data = read_to(sock, b"no such end")
    assert data.startswith(b"HTTP/1.1 400 ")
    assert data.count(b"HTTP/1.1 ") == 2  # the answer, and its words


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 not http\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100001\r\n\r\n", 413),
        (
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"c350\r\n" + b" " * 50_000 + b"\r\n") * 3,
            413,
        ),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 1_000_000, 431),
    ],
)
def test_bad_http_is_answered_and_the_connection_closed(
    fake: Host, data: bytes, status: int
) -> None:
    with fake.raw() as sock:
        with contextlib.suppress(ConnectionError):  # it may hang up before all is sent
            sock.sendall(data)
        answer = read_to(sock, b"no such end")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'"message"' in answer
    assert fake.ask("/health")[0] == 200


def test_a_large_body_may_ask_first(fake: Host) -> None:
    content = json.dumps(body(max_tokens=1)).encode()
    with fake.raw() as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(content)}\r\n"
        sock.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert read_to(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        sock.sendall(content)
        assert read_to(sock, b"}}").startswith(b"HTTP/1.1 200 ")


def test_a_client_that_goes_away_aborts_its_request(start: Callable[..., Host]) -> None:
    host = start("fake", STALLED).wait_until_ready()
    with host.raw() as sock:
        sock.sendall(http_request(body(stream=True)))
        read_to(sock, b"data: ")
        assert host.metric("num_requests_running") == 1
    eventually(lambda: host.metric("num_requests_running") == 0)
    assert host.metric('requests_total{finish_reason="abort"}') == 1


def test_more_than_can_be_taken_on_is_refused(start: Callable[..., Host]) -> None:
    host = start("fake", STALLED, "--max-unfinished", "1").wait_until_ready()
    with host.raw() as sock:
        sock.sendall(http_request(body()))
        eventually(lambda: host.metric("num_requests_running") == 1)
        status, answer, headers = host.ask("/v1/completions", body())
        assert (status, headers["Retry-After"]) == (429, "1")
        assert answer["error"]["type"] == "rate_limit_error"
    eventually(lambda: host.metric("num_requests_running") == 0)
    assert host.ask("/v1/completions", body())[0] == 200


# Faults of the fake.


def test_planted_failures_and_lies_reach_the_client(start: Callable[..., Host]) -> None:
    host = start("fake", {**QUICK, "fail_every": 2, "lie_usage_every": 3}).wait_until_ready()
    answers = [host.ask("/v1/completions", body()) for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 500, 200]
    assert answers[1][1]["error"]["message"] == "fake: planted failure of request 2"
    assert [answers[n][1]["usage"]["completion_tokens"] for n in (0, 2)] == [5, 7]


def test_a_planted_death_comes_in_mid_stream(start: Callable[..., Host]) -> None:
    host = start("fake", {**QUICK, "die_after_requests": 2}).wait_until_ready()
    assert host.ask("/v1/completions", body())[0] == 200
    with host.raw() as sock:
        sock.sendall(http_request(body(stream=True, max_tokens=10)))
        data = read_to(sock, STREAM_END)
    assert 0 < data.count(b"data: ") < 10
    assert host.process.wait(30) == 3


def test_another_model_may_be_served_by_plan(start: Callable[..., Host]) -> None:
    host = start("fake", {**QUICK, "wrong_model": True}).wait_until_ready()
    assert host.ask("/v1/models")[1]["data"][0]["id"] == "not_m"


def test_what_loads_is_not_healthy_and_can_be_stopped(start: Callable[..., Host]) -> None:
    host = start("fake", {"hang_on_start": True})
    status, answer, _ = host.ask("/health")
    assert (status, answer["error"]["message"]) == (503, "the engine is loading")
    assert host.ask("/headway/info")[0] == 503
    assert host.stop() == 0


def test_a_death_while_loading_is_the_last_line(start: Callable[..., Host]) -> None:
    host = start("fake", {"die_while_loading": True})
    assert host.process.wait(30) == 1
    assert host.stderr().splitlines()[-1].endswith("planted death while loading")


# Two processes.


def test_an_engine_of_ones_own(counter: Host) -> None:
    _, answer, _ = counter.ask("/v1/completions", body(return_token_ids=True))
    assert answer["choices"][0]["token_ids"] == [12, 13, 14, 15, 16]
    stamps = answer["headway"]
    assert stamps["arrived_s"] <= stamps["at_s"]
    info = counter.ask("/headway/info")[1]
    assert (info["kind"], info["dtype"]) == ("counter", "float32")
    assert "python" in info["versions"]
    assert counter.metric("steps_total") == 5


def test_steps_are_timed_in_the_engine_process(stepped: Host) -> None:
    step = {"phase": "decode", "batch": 3, "length": 8}
    assert stepped.ask("/headway/step", step)[1] == {"seconds": 1.5}
    status, answer, _ = stepped.ask("/headway/step", {**step, "batch": 5})
    assert (status, answer["error"]["message"]) == (400, "batch must be at most 4")
    assert stepped.ask("/headway/step", {**step, "phase": "both"})[0] == 400
    assert stepped.ask("/headway/clock")[1] == {"step_s": 1.5}


def test_an_engine_that_works_by_itself_times_no_step(working: Host) -> None:
    status, answer, _ = working.ask("/headway/step", {"phase": "decode", "batch": 1, "length": 8})
    assert status == 400
    assert "none can be timed" in answer["error"]["message"]
    assert working.ask("/headway/clock")[1] == {"step_s": 0.0}


def test_a_salt_reaches_the_engine_and_what_was_cached_the_client(working: Host) -> None:
    _, answer, _ = working.ask("/v1/completions", body(cache_salt="four"))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "prompt_tokens_details" not in working.ask("/v1/completions", body())[1]["usage"]
    assert working.ask("/v1/completions", body(cache_salt=""))[0] == 400


def test_an_engine_that_dies_by_itself_ends_the_host(working: Host) -> None:
    with working.raw() as sock:
        sock.sendall(http_request(body(stream=True, prompt=[902])))
        begun = read_to(sock, b"data: ")
        working.ask("/v1/completions", body(prompt=[903], max_tokens=3))
        data = begun + read_to(sock, b"no such end")
    assert b"engine process ended with status 1: the cache has left" in data
    assert working.process.wait(30) == 1


def test_a_request_the_engine_refuses_fails_alone(counter: Host) -> None:
    status, answer, _ = counter.ask("/v1/completions", body(prompt=[901]))
    assert (status, answer["error"]["message"]) == (500, "901 is not to my taste")
    assert counter.ask("/v1/completions", body())[0] == 200


def test_a_disconnect_reaches_the_engine_process(counter: Host) -> None:
    with counter.raw() as sock:
        sock.sendall(http_request(body(stream=True, prompt=[902])))
        read_to(sock, b"data: ")
        assert counter.metric("num_requests_running") == 1
    eventually(lambda: counter.metric("num_requests_running") == 0)


def test_an_exception_in_a_step_fails_all_and_ends_the_host(counter: Host) -> None:
    with counter.raw() as neighbour, counter.raw() as sock:
        neighbour.sendall(http_request(body(stream=True, prompt=[902])))
        read_to(neighbour, b"data: ")
        sock.sendall(http_request(body(stream=True, prompt=[900])))
        data = read_to(sock, b"no such end")
        assert b"the cache is on fire" in read_to(neighbour, b"no such end")
    last = data.split(b"data: ")[-1].split(b"\r\n")[0]
    assert json.loads(last)["error"]["message"] == (
        "engine process ended with status 1: ArithmeticError: the cache is on fire"
    )
    assert b"[DONE]" not in data
    assert counter.process.wait(30) == 1
    assert counter.stderr().splitlines()[-1].endswith("ArithmeticError: the cache is on fire")


def test_killing_the_engine_process_fails_all_and_ends_the_host(counter: Host) -> None:
    pid = counter.ask("/headway/info")[1]["settings"]["pid"]
    with counter.raw() as sock:
        sock.sendall(http_request(body(stream=True, prompt=[902])))
        begun = read_to(sock, b"data: ")
        os.kill(pid, signal.SIGKILL)
        data = begun + read_to(sock, b"no such end")
    assert b"engine process ended with status -9" in data
    assert data.endswith(STREAM_END)
    assert counter.process.wait(30) == 1


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("step_engine:Counter", {"die": True}, "MemoryError: no room for the weights"),
        ("step_engine:AsyncCounter", {"die": True}, "MemoryError: no room for the weights"),
        ("step_engine:AsyncCounter", {"refuse": True}, "counting is not for everyone"),
        ("step_engine:Nothing", {}, "module step_engine has no class 'Nothing'"),
        ("no_such_kind", {}, "there is no engine kind 'no_such_kind': use hf_naive"),
    ],
)
def test_an_engine_that_cannot_load_says_why(
    start: Callable[..., Host], kind: str, args: dict[str, object], said: str
) -> None:
    host = start(kind, args)
    assert host.process.wait(30) == 1
    last = host.stderr().splitlines()[-1]
    assert re.search("engine process ended with status 1 while loading: .*" + said, last)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_stopping_leaves_no_process(counter: Host) -> None:
    pid = counter.ask("/headway/info")[1]["settings"]["pid"]
    assert is_alive(pid)
    with counter.raw() as sock:
        sock.sendall(http_request(body(stream=True, prompt=[902])))
        read_to(sock, b"data: ")
        assert counter.stop() == 0
    assert not is_alive(pid)


def test_the_engine_process_does_not_outlive_its_front(counter: Host) -> None:
    pid = counter.ask("/headway/info")[1]["settings"]["pid"]
    counter.process.kill()
    counter.process.wait()
    eventually(lambda: not is_alive(pid) or is_zombie(pid))


def is_zombie(pid: int) -> bool:
    """An orphan whose new parent does not look after it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False


def test_wrong_arguments_are_usage_errors(tmp_path: Path) -> None:
    command = [sys.executable, boot.__file__, "headway.engines.host", "fake", "--port", "0"]
    for more, said in (
        (["--args", '{"ttft": 1}'], "fake has no argument 'ttft'"),
        (["--args", "["], "--args must be JSON"),
        (["--model-json", '{"name": "x"}'], "the JSON of a ModelFolder lacks"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert said in done.stderr.splitlines()[-1]


# Without HTTP: the same bodies, served inside.


def replayed(host: Host, *prompts: object, **fields: object) -> tuple[int, Any]:
    requests = [body(prompt=prompt, stream=True, ignore_eos=True) for prompt in prompts]
    status, answer, _ = host.ask("/headway/replay", {"requests": requests, **fields})
    return status, answer


@pytest.mark.parametrize("kind", ["fake", "stepped", "working"])
def test_requests_are_replayed_inside(kind: str, request: pytest.FixtureRequest) -> None:
    host: Host = request.getfixturevalue(kind)
    prompts = [[11, 12], [13], "<14><15>", [16], [17]]
    if kind != "fake":
        prompts[2] = [14, 15]
    before_s = time.monotonic()
    status, answer = replayed(host, *prompts, concurrency=2, slots_s=[0.005, 0.01])
    assert status == 200
    lives = answer["requests"]
    assert before_s <= answer["start_s"]
    assert lives[0]["due_s"] == answer["start_s"] + 0.005
    assert [sum(n for _, n in life["departed"]) for life in lives] == [5] * 5
    for place, life in enumerate(lives):
        assert life["due_s"] <= life["arrived_s"] <= life["departed"][0][0]
        assert life["finish_reason"] == "length"
        assert life["ended_s"] == life["departed"][-1][0] <= time.monotonic()
        together = [x for x in lives[:place] if x["ended_s"] > life["arrived_s"]]
        assert len(together) < 2
    assert host.ask("/v1/completions", body())[0] == 200


def test_what_cannot_be_replayed_is_refused(fake: Host) -> None:
    for fields, says in (
        ({"requests": []}, "requests must be a list of at least one"),
        ({"concurrency": 0}, "concurrency must be from 1 to"),
        ({"slots_s": [0.0, 0.0]}, "slots_s must be 1 numbers of seconds"),
        ({"slots_s": [-1.0]}, "slots_s must be 1 numbers of seconds"),
        ({"requests": [body(), body(prompt=[5000])]}, "requests[1]: prompt holds token id 5000"),
        ({"requests": [body(model="other")]}, "requests[0]: model 'other' is not served here"),
        ({"requests": ["text"]}, "requests[0]: the body must be a JSON object"),
        ({"rate": 3}, 'unknown field "rate"'),
    ):
        asked = {"requests": [body()], "concurrency": 1, **fields}
        status, answer, _ = fake.ask("/headway/replay", asked)
        assert 400 <= status < 500
        assert says in answer["error"]["message"]


@pytest.mark.parametrize("kind", ["fake", "step_engine:Counter", "step_engine:AsyncCounter"])
def test_a_replay_has_the_engine_to_itself_until_its_client_goes(
    start: Callable[..., Host], kind: str
) -> None:
    host = start(kind, STALLED if kind == "fake" else {}).wait_until_ready()
    content = json.dumps({"requests": [body(prompt=[902])] * 3, "concurrency": 1}).encode()
    head = f"POST /headway/replay HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with host.raw() as sock:
        sock.sendall(head.encode() + content)
        eventually(lambda: host.metric("num_requests_running") == 1)
        status, answer = replayed(host, [11], concurrency=1)
        assert (status, answer["error"]["message"]) == (
            409,
            "requests are replayed on an idle engine; a replay runs",
        )
        assert host.ask("/v1/completions", body())[0] == 409
        step = {"phase": "decode", "batch": 1, "length": 8}
        assert host.ask("/headway/step", step)[0] == 409
    eventually(lambda: host.ask("/v1/completions", body())[0] == 200)
    assert replayed(host, [11], concurrency=1)[0] == 200
    with host.raw() as sock:
        sock.sendall(http_request(body(stream=True, prompt=[902], max_tokens=5000)))
        read_to(sock, b"data: ")
        assert replayed(host, [11], concurrency=1)[1]["error"]["message"].endswith("1 requests run")


def test_an_engine_that_ends_in_a_replay_says_why(counter: Host) -> None:
    status, answer = replayed(counter, [11], [900], concurrency=2)
    assert status == 500
    assert "the cache is on fire" in answer["error"]["message"]
    assert counter.process.wait(30) == 1


def test_a_request_that_is_refused_in_a_replay_fails_alone(counter: Host) -> None:
    _, answer = replayed(counter, [901], [12], concurrency=1)
    assert [life["error"] for life in answer["requests"]] == ["901 is not to my taste", None]
