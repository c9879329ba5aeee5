"""The mock server: its streams, faults and log, by raw sockets and by the official client."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httptools
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import sse
from headway.mock_server import plan, truth
from headway.mock_server.asked import DEFAULT_TOKENS, Asked, RefusedError, parse
from headway.mock_server.dialects import DIALECTS, WORDS, Answer, Writer, ids_of, text_of
from headway.mock_server.timing import Timing, dues
from headway.tables import SuiteError

HEADWAY = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())"]
QUICK = ("--ttft", "0.005", "--itl", "0.002")
USAGE = {"include_usage": True}
PATHS = {False: "/v1/completions", True: "/v1/chat/completions"}


@dataclass
class Mock:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    def stop(self, number: int = signal.SIGTERM) -> tuple[truth.Record, ...]:
        self.process.send_signal(number)
        assert self.process.wait(20) == 0, self.process.stderr.read()
        return truth.load(self.log)


@pytest.fixture
def mock(tmp_path) -> Iterator[Any]:
    """Starts servers; whatever a test leaves running is ended."""
    running: list[Mock] = []

    def start(*words: str, faults: str | None = None) -> Mock:
        log = tmp_path / f"truth{len(running)}.jsonl"
        more = ["--log", str(log), *words]
        if faults is not None:
            (tmp_path / "plan.toml").write_text(faults)
            more += ["--plan", str(tmp_path / "plan.toml")]
        process = subprocess.Popen(
            [*HEADWAY, "mock-server", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = process.stdout.readline()
        assert line, process.stderr.read()
        told = json.loads(line)
        assert told["pid"] == process.pid
        assert told["base_url"].endswith(f"://127.0.0.1:{told['port']}")
        running.append(Mock(process, told["port"], log))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        one.process.stdout.close()
        one.process.stderr.close()


@dataclass
class Got:
    """One response off a socket, every read stamped before it is looked at."""

    status: int | None = None
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    reads_s: list[float] = field(default_factory=list)
    ended: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.chunks)

    @property
    def said(self) -> sse.Stream:
        return sse.parse(self.chunks)


class Receiver:
    """What httptools calls back."""

    def __init__(self, got: Got) -> None:
        self.got = got
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False

    def on_headers_complete(self) -> None:
        self.got.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.got.chunks.append((self.got.reads_s[-1], body))

    def on_message_complete(self) -> None:
        self.complete = True


def connect(server: Mock) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(10)
    return sock


def request(path: str, body: object, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: mock", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


def receive(sock: socket.socket) -> Got:
    got = Got()
    receiver = Receiver(got)
    try:
        while not receiver.complete:
            data = sock.recv(65536)
            got.reads_s.append(time.monotonic())
            if not data:
                got.ended = "eof"
                return got
            receiver.parser.feed_data(data)
    except ConnectionResetError:
        got.ended = "reset"
    except TimeoutError:
        got.ended = "silent"
    except httptools.HttpParserError:
        got.ended = "malformed"
    else:
        got.ended = "complete"
    return got


def asking(chat: bool = False, n: int = 5, stream: bool = True, **more: object) -> bytes:
    asked: dict[str, object] = {"max_tokens": n, "stream": stream, **more}
    if stream:
        asked.setdefault("stream_options", USAGE)
    if chat:
        asked["messages"] = [{"role": "user", "content": "one two three"}]
    else:
        asked.setdefault("prompt", [7, 8, 9])
    return request(PATHS[chat], asked)


def ask(server: Mock, *words: Any, timeout_s: float = 10, **more: Any) -> Got:
    with connect(server) as sock:
        sock.settimeout(timeout_s)
        sock.sendall(asking(*words, **more))
        return receive(sock)


def dechunk(data: bytes) -> bytes:
    """Read a chunked body by hand, strictly: the oracle for the framing."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        assert data[n : n + 2] == b"\r\n"
        body, data = body + data[:n], data[n + 2 :]
        if n == 0:
            assert data == b""
            return body


## what is written


@given(
    dialect=st.sampled_from(list(DIALECTS)),
    chat=st.booleans(),
    n=st.integers(1, 200),
    size=st.integers(1, 70),
    usage=st.booleans(),
    continuous=st.booleans(),
    ids=st.booleans(),
)
def test_a_stream_says_what_was_asked_for(dialect, chat, n, size, usage, continuous, ids):
    asked = Asked(chat, True, 11, n, usage, continuous, ids)
    answer = Answer(Writer(dialect, "m", size, 1_700_000_000), asked, 42, 1.5)
    writes = list(answer.stream())
    assert len(writes) == answer.num_writes() == math.ceil(n / size)
    body = dechunk(answer.early() + b"".join(writes))
    said = sse.parse([(0.0, body)])
    assert said.error is None
    assert "".join(event.text for event in said.events) == text_of(0, n)
    assert len("".join(event.text for event in said.events).split()) == n
    assert len(said.events) == len(writes)
    assert [answer.tokens(k) for k in range(len(writes))] == [
        len(event.text.split()) for event in said.events
    ]
    assert said.finish_reason == "length"
    always = dialect == "transformers" or (dialect == "llama_cpp" and not chat)
    assert said.completion_tokens == (n if usage or always else None)
    assert said.prompt_tokens == (11 if usage or always else None)
    assert said.done == (dialect != "transformers")
    found = list(itertools.chain(*(event.token_ids or () for event in said.events)))
    assert found == (ids_of(0, n) if ids and dialect in ("vllm", "headway") else [])
    bodies = [json.loads(data) for _, data in sse.events([(0.0, body)]) if data != b"[DONE]"]
    assert {b["id"] for b in bodies} == {f"{'chatcmpl' if chat else 'cmpl'}-{42:012}"}
    if usage and continuous and DIALECTS[dialect].chat.continuous_usage:
        counts = [
            b["usage"]["completion_tokens"]
            for b in bodies
            if b["choices"]
            and (b["choices"][0].get("text") or b["choices"][0].get("delta", {}).get("content"))
        ]
        assert counts == [min((k + 1) * size, n) for k in range(len(writes))]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_over_a_socket(mock, dialect):
    server = mock(*QUICK, "--dialect", dialect, "--tokens-per-chunk", "2")
    with connect(server) as sock:  # one connection for all
        for chat in (False, True):
            sock.sendall(asking(chat, 5, return_token_ids=True))
            got = receive(sock)
            said = got.said
            assert (got.status, got.ended, said.error) == (200, "complete", None)
            assert "".join(event.text for event in said.events) == text_of(0, 5)
            assert (said.prompt_tokens, said.completion_tokens) == (3, 5)
            assert len(said.events) == 3
            first = json.loads(next(sse.events(got.chunks))[1])["choices"][0]
            if chat:
                assert first["delta"]["role"] == "assistant"
            sock.sendall(asking(chat, 5, stream=False))
            whole = json.loads(receive(sock).body)
            choice = whole["choices"][0]
            assert (choice["message"]["content"] if chat else choice["text"]) == text_of(0, 5)
            assert whole["usage"]["completion_tokens"] == 5
    records = server.stop()
    assert [r.tokens for r in records] == [(2, 2, 1), (5,)] * 2
    assert {r.connection for r in records} == {1}


def test_a_chat_template_is_not_played_and_defaults_are_stated():
    said = parse(
        True, b'{"messages": [{"content": [{"type": "text", "text": "a b"}]}, {"content": "c"}]}'
    )
    assert said == Asked(True, False, 3, DEFAULT_TOKENS)
    both = b'{"prompt": "a  b", "max_tokens": 3, "max_completion_tokens": null, "stream": null}'
    assert parse(False, both) == Asked(False, False, 2, 3)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "JSON object"),
        (b'{"prompt": 3}', "prompt must be"),
        (b'{"prompt": ["a", "b"]}', "one prompt a request"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens is 0; it must be from 1"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens is True"),
        (b'{"prompt": "a", "stream": 1}', "stream is 1; it must be true or false"),
        (b'{"prompt": "a", "n": 2}', "n is 2"),
        (b'{"prompt": "a", "stream_options": 3}', "stream_options is 3"),
    ],
)
def test_what_counts_is_checked(body, says):
    with pytest.raises(RefusedError, match=says):
        parse(False, body)


def test_a_refused_request_is_answered_and_logged(mock):
    server = mock(*QUICK)
    with connect(server) as sock:
        sock.sendall(request("/v1/completions", {"prompt": 1}))
        got = receive(sock)
        assert got.status == 400
        assert "prompt must be" in json.loads(got.body)["error"]["message"]
        sock.sendall(asking(n=1))
        assert receive(sock).said.done
    refused, served = server.stop()
    assert (refused.ended, refused.writes_s, refused.max_tokens) == ("refused", (), None)
    assert (served.number, served.ended) == (2, "done")


def test_what_clients_ask_for_at_their_start(mock):
    server = mock(*QUICK, "--model", "some/model")
    with connect(server) as sock:
        for path, key in (("/health", None), ("/v1/models", "data"), ("/metrics", None)):
            sock.sendall(f"GET {path}?a=b HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            got = receive(sock)
            assert got.status == 200
            if key:
                (card,) = json.loads(got.body)[key]
                assert card["id"] == card["root"] == "some/model"
        sock.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert receive(sock).status == 404
        sock.sendall(b"\x00\x01 this is not HTTP\r\n\r\n")
        assert receive(sock).status == 400
        assert sock.recv(10) == b""
    assert server.stop() == ()


# The bodies of vllm bench serve, guidellm and aiperf.
PEERS = [
    (False, {"prompt": "a b c", "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True}),
    (
        True,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a b c"}]}],
            "max_completion_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (False, {"prompt": ["a b c"], "min_tokens": 4}),
]


@pytest.mark.parametrize(("chat", "body"), PEERS)
def test_the_bodies_that_peers_send(mock, chat, body):
    server = mock(*QUICK)
    with connect(server) as sock:
        asked = {"model": "x", "max_tokens": 4, "stream": True, "stream_options": USAGE, **body}
        sock.sendall(request(PATHS[chat], asked))
        said = receive(sock).said
    assert (said.prompt_tokens, said.completion_tokens, len(said.events)) == (3, 4, 4)


def test_the_official_client_streams_from_it(mock):
    server = mock(*QUICK)
    base_url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mock"]
        stream = client.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": "one two"}],
            max_completion_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(texts) == text_of(0, 6)
        assert chunks[-1].usage.completion_tokens == 6
        assert chunks[-1].usage.prompt_tokens == 2
        whole = client.completions.create(model="mock", prompt="a b", max_tokens=2)
        assert whole.choices[0].text == text_of(0, 2)


## what goes wrong by plan


def one(kind: str, **keys: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(["[[fault]]", f'kind = "{kind}"', *lines, ""])


def test_an_http_error_before_the_stream(mock):
    server = mock(*QUICK, faults=one("http_error", every=2, status=503, body="later"))
    with connect(server) as sock:
        answers = []
        for _ in range(4):
            sock.sendall(asking(n=2))
            answers.append(receive(sock))
    assert [got.status for got in answers] == [200, 503, 200, 503]
    assert answers[1].body == b"later"
    records = server.stop()
    assert [r.ended for r in records] == ["done", "fault", "done", "fault"]
    assert [r.fault for r in records] == [None, "http_error"] * 2


def test_ignore_eos_refused(mock):
    server = mock(*QUICK, faults=one("refuse_ignore_eos"))
    assert ask(server, ignore_eos=True).status == 400
    assert ask(server, ignore_eos=False).status == 200
    assert [r.fault for r in server.stop()] == ["refuse_ignore_eos", None]


@pytest.mark.parametrize("dialect", ["vllm", "transformers"])
def test_an_error_event_in_a_stream_that_began_well(mock, dialect):
    faults = one("error_event", after_tokens=2, message="out of memory")
    server = mock(*QUICK, "--dialect", dialect, faults=faults)
    with connect(server) as sock:
        sock.sendall(asking())
        got = receive(sock)
        sock.sendall(asking(stream=False))
        assert receive(sock).status == 500
    assert (got.status, got.ended, len(got.said.events)) == (200, "complete", 2)
    assert got.said.error == sse.StreamError("server_error", "out of memory")
    streamed, whole = server.stop()
    assert (streamed.ended, len(streamed.writes_s)) == ("fault", 2)
    assert (whole.ended, len(whole.writes_s)) == ("fault", 0)


@pytest.mark.parametrize(("kind", "ended"), [("reset", "reset"), ("close", "eof")])
@pytest.mark.parametrize("after", [None, 0, 3])
def test_a_connection_that_breaks(mock, kind, ended, after):
    keys = {} if after is None else {"after_tokens": after}
    server = mock(*QUICK, faults=one(kind, **keys))
    got = ask(server)
    assert got.ended == ended
    assert got.status == (None if after is None else 200)
    assert len(got.said.events) == (after or 0)
    assert not got.said.done
    (record,) = server.stop()
    assert (record.ended, record.fault, len(record.writes_s)) == ("fault", kind, after or 0)


def test_malformed_chunks(mock):
    server = mock(*QUICK, faults=one("bad_chunk", after_tokens=1))
    got = ask(server)
    assert (got.ended, len(got.said.events)) == ("malformed", 1)
    assert ask(server, stream=False).ended == "malformed"


def test_a_stall_moves_all_that_follows(mock):
    server = mock(*QUICK, faults=one("stall", after_tokens=2, for_s=0.3))
    got = ask(server)
    assert got.said.done
    assert ask(server, stream=False).status == 200
    streamed, whole = server.stop()
    law = [0.005, 0.002, 0.302, 0.002, 0.002]
    assert streamed.due_s == dues(streamed.parsed_s, iter(law), 5)
    assert all(late >= 0 for late in truth.late_s(streamed))
    assert truth.ttft_s(whole) >= 0.3 + 0.005 + 4 * 0.002 - 1e-6


@pytest.mark.parametrize(
    ("faults", "status", "tokens"),
    [(one("no_answer"), None, 0), (one("stall", after_tokens=2), 200, 2)],
    ids=["no_answer", "stall"],
)
def test_silence_for_ever(mock, faults, status, tokens):
    server = mock(*QUICK, faults=faults)
    got = ask(server, timeout_s=0.3)
    assert (got.ended, got.status, len(got.said.events)) == ("silent", status, tokens)
    wait_for(lambda: b"409" not in answer_to_log(server))  # the server has seen that we left
    (record,) = server.stop()
    assert (record.ended, len(record.writes_s)) == ("client_gone", tokens)


def test_a_stream_without_done_and_one_with_a_comment(mock):
    faults = one("no_done", requests=[1]) + one("comment", requests=[2], after_tokens=3)
    server = mock(*QUICK, faults=faults)
    without, comment = ask(server), ask(server)
    assert without.said.warnings == ("missing_done",)
    assert (without.ended, without.said.completion_tokens) == ("complete", 5)
    assert comment.body.count(b": still alive\n\n") == 1
    assert (comment.said.done, len(comment.said.events)) == (True, 5)
    assert [(r.ended, r.fault) for r in server.stop()] == [("done", "no_done"), ("done", "comment")]


def test_a_fault_beyond_the_end_does_not_happen():
    fault = plan.Fault("reset", after_tokens=5)
    assert not fault.selects(1, Asked(False, True, 1, 5))
    assert fault.selects(1, Asked(False, True, 1, 6))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "fault is empty"),
        ("x = [", "the file is not TOML"),
        ("[[faults]]", "faults is not known; allowed: fault .did you mean fault"),
        ("[[fault]]", "kind is ''; allowed: http_error"),
        (one("stal"), r"fault\[1\].kind is 'stal'"),
        (one("stall") + one("reset", after=3), r"fault\[2\].after is not known"),
        (one("no_done", after_tokens=1), "after_tokens is not known"),
        (one("stall", for_s=-1), "for_s is -1.0; it must be above 0"),
        (one("stall", after_tokens=-1), "after_tokens is -1; it must be 0 or more"),
        (one("http_error", status=200), "status is 200; it must be from 400 to 599"),
        (one("no_answer", every=0), "every is 0; it must be above 0"),
        (one("no_answer", requests=[0]), r"requests is \[0\]; it must be a list of numbers from 1"),
        (one("no_answer", requests=[1], every=2), "every cannot stand beside requests"),
    ],
    ids=itertools.count(),
)
def test_a_wrong_plan_is_one_clear_sentence(tmp_path, text, says):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(SuiteError, match=says) as error:
        plan.load(path)
    assert str(path) in str(error.value)


def test_a_plan_may_be_json(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"fault": [{"kind": "close", "requests": [2], "after_tokens": 1}]}')
    assert plan.load(path).faults == (plan.Fault("close", requests=(2,), after_tokens=1),)
    path.write_text("[]")
    with pytest.raises(SuiteError, match="must hold an object"):
        plan.load(path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ttft", "-1"], "--ttft is -1.0; it must be 0 or more seconds"),
        (["--itl", "nan"], "--itl is nan"),
        (["--jitter", "1"], "--jitter is 1.0; it must be from 0 to below 1"),
        (["--port", "70000"], "--port is 70000"),
        (["--tokens-per-chunk", "0"], "--tokens-per-chunk is 0"),
        (["--dialect", "tg"], "invalid choice: 'tg'"),
        (["--plan", "none.toml"], "none.toml: the file cannot be read: No such file"),
        (["--log", "/dev/null/x"], "--log /dev/null/x cannot be written"),
        (["--tls", "none", "none"], "--tls none none cannot be used"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1 port 0"),
    ],
)
def test_wrong_arguments_end_with_2(words, says):
    done = subprocess.run(
        [*HEADWAY, "mock-server", *words], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


## when it is written


@given(
    number=st.integers(1, 10**6),
    seed=st.integers(0, 10**6),
    jitter=st.floats(0, 0.99),
    n=st.integers(1, 60),
)
def test_the_law_of_the_due_times(number, seed, jitter, n):
    timing = Timing(0.1, 0.02, jitter, seed)
    gaps = list(itertools.islice(timing.gaps(number), n))
    assert gaps == list(itertools.islice(timing.gaps(number), n + 1))[:n]
    for gap, base in zip(gaps, [0.1] + [0.02] * n, strict=False):
        assert base * (1 - jitter) - 1e-12 <= gap <= base * (1 + jitter) + 1e-12
    stalled = list(itertools.islice(timing.gaps(number, n - 1, 5.0), n))
    assert stalled[:-1] == gaps[:-1]
    assert stalled[-1] == gaps[-1] + 5.0
    assert dues(7.0, iter(gaps), n)[-1] == pytest.approx(7.0 + math.fsum(gaps))


def test_jitter_is_uniform_and_differs_between_requests_and_seeds():
    timing = Timing(0.1, 0.02, 0.5, 3)
    gaps = list(itertools.islice(timing.gaps(1), 1, 4001))
    assert fmean(gaps) == pytest.approx(0.02, rel=0.03)
    quarters = Counter(int((gap / 0.02 - 0.5) * 4) for gap in gaps)
    assert all(900 <= quarters[k] <= 1100 for k in range(4))
    others = [timing.gaps(2), dataclasses.replace(timing, seed=4).gaps(1)]
    assert all(list(itertools.islice(other, 1, 11)) != gaps[:10] for other in others)


def test_the_log_agrees_with_what_a_client_saw(mock):
    server = mock("--ttft", "0.03", "--itl", "0.005", "--jitter", "0.5", "--seed", "7")
    asked_s = time.monotonic()
    gots: dict[int, Got] = {}

    def client(k: int) -> None:
        gots[k] = ask(server, k % 2 == 0, 10 + k)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = server.stop()
    assert [r.number for r in records] == list(range(1, 33))
    by_length = {r.max_tokens: r for r in records}
    timing = Timing(0.03, 0.005, 0.5, 7)
    for k, got in gots.items():
        record = by_length[10 + k]
        assert record.endpoint == ("completions" if k % 2 else "chat")
        assert record.tokens == (1,) * (10 + k)
        assert (record.ended, record.fault, record.blocked_bytes) == ("done", None, 0)
        # The clocks: only the machine's own, in the one order that can be.
        assert record.arrived_s is not None
        assert asked_s <= record.arrived_s <= record.parsed_s <= record.writes_s[0]
        assert record.accepted_s <= record.parsed_s
        assert list(record.writes_s) == sorted(record.writes_s)
        read_s = [event.at_s for event in got.said.events]
        assert all(w <= r for w, r in zip(record.writes_s, read_s, strict=True))
        # The law: due when (seed, number) said so, never written before.
        assert record.due_s == dues(record.parsed_s, timing.gaps(record.number), 10 + k)
        assert all(late >= 0 for late in truth.late_s(record))
        assert len(truth.itl_s(record)) == 9 + k
        assert truth.ttft_s(record) >= 0.015
    assert 1 <= truth.peak_concurrency(records) <= 32


def test_what_falls_behind_catches_up_and_says_how_late_it_was(mock):
    server = mock("--ttft", "0.01", "--itl", "0.01")
    with connect(server) as sock:
        sock.sendall(asking(n=60))
        first = sock.recv(4096)
        assert first.startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGCONT)
        while not first.endswith(b"0\r\n\r\n"):
            first += sock.recv(65536)
    (record,) = server.stop()
    assert max(truth.late_s(record)) > 0.1
    # Deadlines are absolute: what was missed follows at once. Were each gap counted from the
    # write before, none could be shorter than it should be.
    assert sum(gap < 0.005 for gap in truth.itl_s(record)) > 5


def test_requests_in_a_row_on_one_connection_are_answered_in_a_row(mock):
    server = mock(*QUICK)
    with connect(server) as sock:
        # The next response's bytes may come with the last one's end, so read to the very end.
        body = asking(n=3) + asking(n=2, stream=False)
        sock.sendall(
            body + request("/v1/completions", {"prompt": "a", "max_tokens": 1}, "Connection: close")
        )
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert data.endswith(b'"total_tokens":2}}')
    assert [r.tokens for r in server.stop()] == [(1, 1, 1), (2,), (1,)]


def test_a_client_that_does_not_read_is_waited_for(mock):
    server = mock("--ttft", "0", "--itl", "0", "--tokens-per-chunk", "100")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.settimeout(20)
        sock.sendall(asking(n=1_000_000))
        time.sleep(0.5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        got = receive(sock)
    assert "".join(event.text for event in got.said.events) == text_of(0, 1_000_000)
    (record,) = server.stop()
    assert (record.ended, len(record.writes_s)) == ("done", 10_000)
    assert record.blocked_bytes > 0
    assert list(record.writes_s) == sorted(record.writes_s)
    reads_s = [event.at_s for event in got.said.events]
    assert all(w <= r for w, r in zip(record.writes_s, reads_s, strict=True))


def test_a_client_that_leaves(mock):
    server = mock("--ttft", "0.001", "--itl", "0.01")
    with connect(server) as sock:
        sock.sendall(asking(n=1000))
        sock.recv(65536)
    wait_for(lambda: b"409" not in answer_to_log(server))
    (record,) = server.stop()
    assert record.ended == "client_gone"
    assert len(record.writes_s) < 1000


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def answer_to_log(server: Mock) -> bytes:
    with connect(server) as sock:
        sock.sendall(
            b"POST /mock/log HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_the_log_on_demand_but_never_while_it_serves(mock):
    server = mock(*QUICK, faults=one("no_answer", requests=[1]))
    with connect(server) as sock:
        sock.sendall(asking(n=2))
        wait_for(lambda: b"409" in answer_to_log(server))  # it has been parsed
        assert ask(server).said.done
        assert b"1 requests are being answered" in answer_to_log(server)
    wait_for(lambda: b'"requests":2' in answer_to_log(server))  # it has seen that we left
    records = truth.load(server.log)
    assert [r.ended for r in records] == ["client_gone", "done"]
    assert server.stop() == records


def test_without_a_log_there_is_none_to_ask_for():
    bare = subprocess.Popen([*HEADWAY, "mock-server"], stdout=subprocess.PIPE, text=True)
    try:
        server = Mock(bare, json.loads(bare.stdout.readline())["port"], Path())
        assert b"started without --log" in answer_to_log(server)
        bare.terminate()
        assert bare.wait(20) == 0
    finally:
        bare.kill()
        bare.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_writes_the_log(mock, number, tmp_path):
    server = mock("--ttft", "0.001", "--itl", "0.01")
    with connect(server) as sock:
        sock.sendall(asking(n=100_000))
        sock.recv(65536)
        (record,) = server.stop(number)
        assert record.ended == "stopped"
        assert receive(sock).ended in ("eof", "reset", "malformed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["truth0.jsonl"]
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_tls(mock, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run(
        [*words, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True
    )
    server = mock(*QUICK, "--tls", cert, key)
    context = ssl.create_default_context(cafile=cert)
    with connect(server) as plain, context.wrap_socket(plain, server_hostname="localhost") as sock:
        for _ in range(2):
            sock.sendall(asking(n=4))
            got = receive(sock)
            assert (got.said.completion_tokens, got.said.done) == (4, True)
    records = server.stop()
    assert [(r.ended, r.arrived_s) for r in records] == [("done", None)] * 2


## the reader of the log


def record(parsed_s: float, *writes_s: float, ended_s: float = 9.0) -> truth.Record:
    return truth.Record(
        number=1,
        connection=1,
        endpoint="chat",
        stream=True,
        prompt_tokens=1,
        max_tokens=1,
        accepted_s=0.0,
        arrived_s=None,
        parsed_s=parsed_s,
        due_s=writes_s,
        writes_s=writes_s,
        tokens=(1,) * len(writes_s),
        fault=None,
        ended="done",
        ended_s=ended_s,
        blocked_bytes=0,
    )


def test_what_a_record_says():
    one = record(1.0, 1.5, 1.75, 2.5)
    assert truth.ttft_s(one) == 0.5
    assert truth.itl_s(one) == (0.25, 0.75)
    assert truth.late_s(one) == (0.0, 0.0, 0.0)
    silent = record(1.0)
    assert truth.ttft_s(silent) is None
    assert truth.itl_s(silent) == ()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=30))
def test_peak_concurrency_is_the_most_at_a_time(spans):
    records = [record(start, start + length) for start, length in spans]
    most = max((sum(a <= t < a + n for a, n in spans) for t in range(41)), default=0)
    assert truth.peak_concurrency(records) == most


def test_a_request_without_a_write_is_there_until_its_end():
    assert truth.peak_concurrency([record(1.0, ended_s=5.0), record(4.0, 4.5)]) == 2


@pytest.mark.parametrize("line", ["{", "{}", '{"number": "1"}'])
def test_a_log_that_cannot_be_read_says_where(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(truth.TruthError, match=r"log.jsonl, line 1: "):
        truth.load(path)
    with pytest.raises(truth.TruthError, match="cannot be read"):
        truth.load(tmp_path / "none")


## the package


def test_words_are_plain_and_counted():
    assert len(set(WORDS)) == 64
    assert all(word.strip().isalpha() and word == f" {word.strip()}" for word in WORDS)
    draw = random.Random(1)
    for _ in range(20):
        start, n = draw.randrange(500), draw.randrange(1, 300)
        assert len(text_of(start, n).split()) == len(ids_of(start, n)) == n


def test_it_is_not_imported_until_it_is_asked_for():
    code = "import sys, headway.cli; print(*(m for m in sys.modules if 'mock_server' in m))"
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == []
