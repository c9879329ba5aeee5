"""The parts of the host that need no process: text, stop strings, bodies, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.core import EngineInfo
from headway.engines.contract import Departure, Phase, Submission, parse_options
from headway.engines.fake import FakePlan, FakeTokenizer
from headway.engines.host.front import Front, Limits
from headway.engines.host.http import HttpRequest, Reply
from headway.engines.host.openai import BadRequestError, parse_ask
from headway.engines.host.text import Detokenizer, StopStrings, Transcript
from headway.engines.host.wire import Lines, to_line


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose ids are bytes; the hardest case for detokenizing as they come."""
    return bytes(ids).decode("utf-8", "replace")


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


def stream(ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode_bytes)
    return [*(detokenizer.push(piece) for piece in pieces(ids, cuts)), detokenizer.finish()]


cuts = st.lists(st.integers(0, 400))
every_byte = list(range(400))


@given(st.binary(max_size=300), cuts)
@example(b"\x80" * 200, every_byte)
@example(b"\xf0\x9f\x98" * 70, every_byte)
@example("😀".encode() * 70, every_byte)
def test_streamed_text_adds_up_to_the_text_of_all_ids(data: bytes, cuts: list[int]) -> None:
    assert "".join(stream(data, cuts)) == decode_bytes(data)


@given(st.text(alphabet="aé€😀\u0301", max_size=120), cuts)
@example("😀" * 100, every_byte)
def test_no_piece_of_good_text_holds_half_a_character(text: str, cuts: list[int]) -> None:
    streamed = stream(text.encode(), cuts)
    assert "".join(streamed) == text
    assert "�" not in "".join(streamed)


def test_text_leaves_as_soon_as_its_characters_are_whole() -> None:
    assert stream("a€b".encode(), every_byte) == ["a", "", "", "€", "b", ""]


def test_bytes_that_are_no_character_do_not_wait_for_ever() -> None:
    assert len("".join(stream(b"\x80" * 100, every_byte)[:-1])) > 50


def cut_by_definition(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first, read one character at a time."""
    for end in range(len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)]
    return text


small = st.text(alphabet="ab", min_size=1, max_size=4)


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=8), st.lists(small, max_size=3))
def test_stop_strings_cut_the_same_however_the_text_came(
    texts: list[str], stops: list[str]
) -> None:
    machine = StopStrings(stops)
    out = "".join([machine.push(text) for text in texts])
    whole = "".join(texts)
    assert machine.hit == any(stop in whole for stop in stops)
    assert out + machine.finish() == cut_by_definition(whole, stops)


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=8), small)
def test_only_what_could_begin_a_stop_string_is_held_back(texts: list[str], stop: str) -> None:
    machine = StopStrings([stop])
    taken = out = ""
    for text in texts:
        taken, out = taken + text, out + machine.push(text)
        if not machine.hit:
            held = taken[len(out) :]
            assert taken.startswith(out)
            assert stop.startswith(held)
            assert held != stop


def test_the_id_that_ended_an_answer_is_no_text_but_a_token() -> None:
    transcript = Transcript(FakeTokenizer().decode, (), (1,))
    assert transcript.take((11,), None).text == "<11>"
    last = transcript.take((12, 1), "stop")
    assert (last.text, last.token_ids, transcript.num_tokens) == ("<12>", (12, 1), 3)
    emitted = Transcript(FakeTokenizer().decode, (), (1,))
    assert emitted.take((12, 1), "length").text == "<12><1>"


GOOD: Mapping[str, object] = {"model": "m", "prompt": [1, 2]}


def refusal(fields: Mapping[str, object], chat: bool = False) -> BadRequestError:
    base = {"model": "m", "messages": [{"role": "user", "content": "x"}]} if chat else GOOD
    with pytest.raises(BadRequestError) as caught:
        parse_ask(json.dumps({**base, **fields}).encode(), chat)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None),
        ("model", 7),
        ("prompt", None),
        ("prompt", [1, "a"]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "0"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("ignore_eos", "yes"),
        ("return_token_ids", 1),
        ("n", 2),
        ("n", True),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("max_completion_tokens", 5),
        ("messages", []),
        ("ignore_oes", True),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object) -> None:
    error = refusal({field: value})
    assert error.status == 400
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    "messages",
    [[], "x", [5], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}]],
)
def test_wrong_messages_are_refused(messages: object) -> None:
    assert refusal({"messages": messages}, chat=True).param == "messages"


def test_an_unknown_field_is_answered_with_those_that_are_known() -> None:
    error = refusal({"ignore_oes": True})
    assert "ignore_eos" in error.message
    assert refusal({"prompt": "x"}, chat=True).param == "prompt"
    assert refusal({"stream": True, "stream_options": {"usage": True}}).param == (
        "stream_options.usage"
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="body"):
        parse_ask(body, chat=False)


def test_every_field_arrives() -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    fields = {
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": -3,
        "stop": "x",
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": "s",
    }
    ask = parse_ask(json.dumps({**GOOD, **neutral, **fields}).encode(), chat=False)
    assert (ask.max_tokens, ask.stream, ask.include_usage) == (9, True, True)
    assert (ask.temperature, ask.top_p, ask.seed, ask.stop) == (0.5, 0.25, -3, ("x",))
    assert (ask.ignore_eos, ask.return_token_ids, ask.chat, ask.salt) == (True, True, False, "s")


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [("a", "a", None), (["a"], "a", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_all_four_kinds_of_prompt(prompt: object, text: object, ids: object) -> None:
    ask = parse_ask(json.dumps({"model": "m", "prompt": prompt, "seed": None}).encode(), False)
    assert (ask.prompt_text, ask.prompt_token_ids, ask.max_tokens) == (text, ids, 16)


@given(st.lists(st.integers()), st.lists(st.integers(0, 200)))
def test_lines_are_messages_however_they_were_cut(numbers: list[int], cuts: list[int]) -> None:
    data = b"".join(to_line({"n": number, "text": "a\nb"}) for number in numbers)
    lines = Lines()
    found = [message for piece in pieces(data, cuts) for message in lines.feed(bytes(piece))]
    assert [message["n"] for message in found] == numbers


def test_arguments_are_checked_by_their_types() -> None:
    assert parse_options("k", FakePlan, {"ttft_s": 1}).ttft_s == 1


class Wire:
    """Stands where a connection stands, and keeps what was written."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def replied(self, keep_alive: bool) -> None:
        pass


class StubBackend:
    """Is ready at once and ends when told."""

    def __init__(self) -> None:
        self.submitted: list[Callable[[Departure], None]] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> EngineInfo:
        return EngineInfo("stub", "0", "m", "float32", "cpu")

    def submit(self, submission: Submission, deliver: Callable[[Departure], None]) -> None:
        self.submitted.append(deliver)

    def abort(self, submission_id: int) -> None:
        pass

    async def control(self, phase: Phase, batch: int, length: int) -> float:
        return 0.25

    async def stats(self) -> Mapping[str, float]:
        return {"running": 1, "blocks_total": 7, "blocks_free": 3}

    async def ended(self) -> str:
        return await self.end

    async def close(self) -> None:
        pass


def call(front: Front, method: str, path: str, body: object = None) -> Wire:
    wire = Wire()
    request = HttpRequest(method, path, json.dumps(body).encode(), True, True)
    front.handle(request, Reply(wire, request))  # type: ignore[arg-type]
    return wire


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


def test_health_follows_the_engine() -> None:
    async def run() -> None:
        backend = StubBackend()
        front = Front(backend, FakeTokenizer, "m", Limits(1000, 50, 4))
        assert call(front, "GET", "/health").sent.startswith(b"HTTP/1.1 503")
        assert call(front, "POST", "/v1/completions", GOOD).sent.startswith(b"HTTP/1.1 503")
        life = asyncio.create_task(front.live())
        await turn()
        assert call(front, "GET", "/health").sent.startswith(b"HTTP/1.1 200")
        backend.end.set_result("engine process ended with status -9")
        assert await life == "engine process ended with status -9"
        dead = call(front, "GET", "/health").sent
        assert dead.startswith(b"HTTP/1.1 503")
        assert b"ended with status -9" in dead
        assert call(front, "POST", "/v1/completions", GOOD).sent.startswith(b"HTTP/1.1 503")

    asyncio.run(run())


def test_steps_are_timed_on_an_idle_engine_and_add_up_to_the_clock() -> None:
    async def run() -> None:
        front = Front(StubBackend(), FakeTokenizer, "m", Limits(1000, 50, 4))
        life = asyncio.create_task(front.live())
        await turn()
        step = {"phase": "decode", "batch": 2, "length": 8}
        wires = [call(front, "POST", "/headway/step", step) for _ in range(2)]
        await turn()
        assert all(wire.sent.endswith(b'{"seconds": 0.25}') for wire in wires)
        assert call(front, "GET", "/headway/clock").sent.endswith(b'{"step_s": 0.5}')
        call(front, "POST", "/v1/completions", GOOD)
        busy = call(front, "POST", "/headway/step", step)
        await turn()
        assert busy.sent.startswith(b"HTTP/1.1 409")
        life.cancel()

    asyncio.run(run())


def test_metrics_are_typed_and_hold_what_the_engine_says() -> None:
    async def run() -> str:
        front = Front(StubBackend(), FakeTokenizer, "m", Limits(1000, 50, 4))
        life = asyncio.create_task(front.live())
        await turn()
        wire = call(front, "GET", "/metrics")
        await turn()
        life.cancel()
        return wire.sent.decode()

    text = asyncio.run(run())
    assert "headway:num_requests_running 1.0\n" in text
    assert "# TYPE headway:blocks_total counter\nheadway:blocks_total 7.0\n" in text
    assert "# TYPE headway:blocks_free gauge\nheadway:blocks_free 3.0\n" in text
    assert text.count("# HELP") == text.count("# TYPE")
