"""What an endpoint understands: each way of saying one thing and doing another is planted."""

from __future__ import annotations

import json
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway import transport
from headway.core import Capabilities, Request
from headway.engines.endpoint import Endpoint
from headway.engines.launcher import Launcher, LaunchError, LaunchSpec
from headway.loadgen import Recipient
from headway.mock_server.dialects import DIALECTS
from headway.night import probe as probing
from headway.night.found import Answer, Found, named_in, of_answer, optional, pins, without
from headway.night.probe import LONG_TOKENS, MOST_REQUESTS, TOKENS, first_output, probe, probed
from headway.sse import Stream
from headway.transport import Target

odd = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("odd_server.py"))))
PROMPT = tuple(range(20, 28))
SHORT = Request(0, PROMPT, TOKENS)
FIELDS = {"return_token_ids": True, "repetition_penalty": 1.0, "top_k": -1}
DOCUMENTED = Capabilities(cached_tokens=True, fields=FIELDS, salt="cache_salt")


def asked(can: Capabilities = DOCUMENTED, **behaviour: Any) -> tuple[Found, list[dict[str, Any]]]:
    with odd.serving(**behaviour) as (url, does):
        recipient = Recipient(Target.parse(url), "fake", can)
        found = transport.run(probe(recipient, SHORT, (odd.EOS,), LONG_TOKENS))
        return found, does.bodies


def test_an_endpoint_that_does_as_it_says_is_left_as_it_is() -> None:
    found, bodies = asked()
    assert found == Found(DOCUMENTED)
    assert len(bodies) == 7
    assert all(body["max_tokens"] <= TOKENS for body in bodies)


def test_a_server_that_runs_on_is_probed_anew() -> None:
    """What it remembers of an earlier probe is no proof that it ignores salts."""
    with odd.serving() as (url, _):
        for _ in range(2):
            recipient = Recipient(Target.parse(url), "fake", DOCUMENTED)
            found = transport.run(probe(recipient, SHORT, (odd.EOS,), LONG_TOKENS))
            assert found == Found(DOCUMENTED)


# What is planted, what is found other than documented, what is said of it.
ODD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"ids": False}, {"ids_out": False}, "return_token_ids is accepted, yet no token ids come"),
    ({"usage": False}, {"usage_in_stream": False}, "stream_options is accepted, yet no usage"),
    ({"more_prompt_tokens": 2}, {"ids_in": False}, "it counts 290 prompt tokens where 288 ids"),
    (
        {"ignore_eos": "ignored", "eos_at": 3},
        {"ignore_eos": "none"},
        "ignore_eos is accepted, yet it ended after 3 of 8 tokens",
    ),
    (
        {"ignore_eos": "ignored"},
        {"ignore_eos": "none"},
        "ignore_eos is accepted, yet the end mark ends an answer of 8 tokens early",
    ),
    (
        {"ignore_eos": "ban"},
        {"ignore_eos": "ban"},
        "with ignore_eos the end mark is banned, which is not documented",
    ),
    ({"bias": False}, {}, "documented, not proven: logit_bias has no effect"),
    ({"refuses": ("logit_bias",)}, {}, "documented, not proven: logit_bias is answered with"),
    ({"penalty": 1.1}, {}, "defaults would change greedy output: without repetition_penalty"),
    ({"salted": False}, {"salt": None}, "cache_salt is accepted, yet 272 prompt tokens were"),
    ({"refuses": ("*",), "status": 422}, {"strict_fields": True}, "does not know is refused"),
    ({"logprobs": True}, {"logprobs": True}, ""),
    # Case 15: guidellm sends ignore_eos to everyone.
    (
        {"refuses": ("ignore_eos",)},
        {"ignore_eos": "none"},
        "ignore_eos is not sent to it: it answered 400 .*unknown field ignore_eos",
    ),
]


@pytest.mark.parametrize(("planted", "change", "said"), ODD, ids=lambda v: str(v)[:40])
def test_what_it_does_otherwise_is_found_and_said(
    planted: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    found, bodies = asked(**planted)
    fields = found.can.fields
    assert replace(found.can, fields=FIELDS) == replace(DOCUMENTED, **change)
    assert fields.keys() == FIELDS.keys() - ({"return_token_ids"} if "ids" in planted else set())
    if said:
        assert [one for one in found.notices if re.search(said, one)], found.notices
    # Without ids the end mark cannot be seen either.
    assert len(found.notices) == (1 if said else 0) + ("ids" in planted)
    assert len(bodies) <= MOST_REQUESTS


def test_what_is_useless_is_not_sent_again() -> None:
    _, bodies = asked(ids=False, usage=False, ignore_eos="ignored", eos_at=2)
    for body in bodies[1:]:
        assert not {"return_token_ids", "stream_options", "ignore_eos"} & body.keys()


@pytest.mark.parametrize("refused", ["ignore_eos", "cache_salt", "stream_options", "top_k"])
def test_a_refusal_without_a_name_is_tracked_down(refused: str) -> None:
    found, bodies = asked(refuses=(refused,), names_what=False)
    left = set(optional(found.can))
    # What says how tokens are chosen is tried together.
    gone = {"top_k", "repetition_penalty"} if refused == "top_k" else {refused}
    assert left == set(optional(DOCUMENTED)) - gone
    assert f"{refused} " in found.notices[0] or refused in found.notices[0]
    assert "it answered 400" in found.notices[0]
    assert len(bodies) <= MOST_REQUESTS


def test_every_field_but_the_needed_ones_may_be_refused() -> None:
    needed = odd.KNOWN - set(optional(DOCUMENTED))
    strict = replace(DOCUMENTED, fields={**FIELDS, "min_p": 0.0})
    refuses = (*optional(DOCUMENTED), "min_p", "logit_bias", "logprobs")
    found, bodies = asked(strict, refuses=refuses)
    assert optional(found.can) == ()
    assert set(bodies[-1]) <= needed | {probing.MADE_UP}
    assert len(bodies) <= MOST_REQUESTS


def test_cold_caches_alone_are_no_other_defaults() -> None:
    """An answer that changes once its prompt is cached says nothing of the pinned fields."""
    outputs = iter([(1, 2), (1, 3), (1, 3)])

    async def ask(request: Request, recipient: Recipient) -> Answer:
        if request.max_tokens == 1 or "logit_bias" in recipient.can.fields:
            return Answer(500)
        ids = next(outputs)
        event = SimpleNamespace(token_ids=ids, text="")
        return Answer(200, Stream((event,), len(request.prompt_token_ids), 2))  # type: ignore[arg-type]

    recipient = Recipient(Target("nowhere", 1), "fake", Capabilities(fields=FIELDS))
    found = transport.run(probe(recipient, replace(SHORT, max_tokens=2), (1,), 0, ask))
    assert not [one for one in found.notices if "defaults" in one]
    assert not list(outputs)


def test_our_own_host_shows_what_there_is_in_its_first_token() -> None:
    event = SimpleNamespace(token_ids=(7,), text="<7>")
    good = Stream((event,), 8, 1)  # type: ignore[arg-type]
    can = Capabilities(hosted=True)
    assert of_answer(can, replace(SHORT, max_tokens=1), good) == Found(can)
    wrong = of_answer(can, replace(SHORT, max_tokens=1), replace(good, prompt_tokens=9))
    assert wrong.can == replace(can, ids_in=False)
    assert wrong.notices == ("it counts 9 prompt tokens where 8 ids were sent",)


def endpoint_of(url: str, tmp_path: Path, can: Capabilities = DOCUMENTED, **more: Any) -> Endpoint:
    model = {"name": "fake", "eos_ids": [odd.EOS]}
    log = tmp_path / "engine.log"
    spec = LaunchSpec("odd", "odd", model, "float32", "cpu", Path(sys.executable), log)
    launcher = Launcher(None, lambda _: pytest.fail("not asked"), can)
    return Endpoint(spec, launcher, url, more.get("process"), time.monotonic())


def test_a_first_token_comes_in_spite_of_a_field_that_is_refused(tmp_path: Path) -> None:
    with odd.serving(refuses=("ignore_eos",)) as (url, does):
        endpoint = endpoint_of(url, tmp_path)
        answer = transport.run(first_output(endpoint, replace(SHORT, max_tokens=1)))
        assert answer.good
        found = transport.run(probed(endpoint, SHORT, [(64, 4)]))
    assert found.can.ignore_eos == "none"
    # No longer than the workloads are: the engine's context may hold no more.
    assert max(len(body["prompt"]) for body in does.bodies) == 64
    assert max(body["max_tokens"] for body in does.bodies) == 4


def test_an_endpoint_that_refuses_everything_is_not_up(tmp_path: Path) -> None:
    with odd.serving(refuses=("prompt",)) as (url, _):
        with pytest.raises(LaunchError, match=r"odd gave no first token: status 400 .*prompt"):
            transport.run(first_output(endpoint_of(url, tmp_path), SHORT))


def test_an_engine_that_dies_of_a_question_ended_while_it_was_probed(tmp_path: Path) -> None:
    port = scripted_port()
    command = [sys.executable, str(Path(__file__).with_name("odd_server.py")), str(port)]
    process = subprocess.Popen([*command, json.dumps({"dies_of": "logprobs"})])
    try:
        endpoint = endpoint_of(f"http://127.0.0.1:{port}", tmp_path, process=process)
        deadline = time.monotonic() + 20
        while not endpoint.serves():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(LaunchError, match="odd ended while it was probed") as caught:
            transport.run(probed(endpoint, SHORT))
        assert caught.value.kind == "died_loading"
    finally:
        process.kill()
        process.wait()


def scripted_port() -> int:
    scripted = runpy.run_path(str(Path(__file__).with_name("scripted_server.py")))
    port: int = scripted["free_port"]()
    return port


def test_silence_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(request: Request, recipient: Recipient) -> Answer:
        return await probing.ask(request, recipient, 0.3)

    with odd.serving(hangs_on="logprobs") as (url, _):
        recipient = Recipient(Target.parse(url), "fake", DOCUMENTED)
        found = transport.run(probe(recipient, SHORT, (odd.EOS,), LONG_TOKENS, ask))
    assert found == Found(DOCUMENTED)
    with odd.serving(hangs_on="prompt") as (url, does):
        recipient = Recipient(Target.parse(url), "fake", DOCUMENTED)
        found = transport.run(probe(recipient, SHORT, (odd.EOS,), LONG_TOKENS, ask))
    assert found.can == DOCUMENTED
    assert found.notices == ("it did not answer the probe: no answer within 0.3 s",)
    assert len(does.bodies) == 1
    # When time is over, no more is asked.
    monkeypatch.setattr(probing, "PROBE_TIMEOUT_S", -1.0)
    found, bodies = asked()
    assert bodies == []
    assert found.can == DOCUMENTED


@pytest.mark.parametrize(
    ("said", "names", "expected"),
    [
        ("body.ignore_eos: extra fields", ["ignore_eos", "top_k"], ["ignore_eos"]),
        ("ignore_eos_token is unknown", ["ignore_eos"], []),
        ("got {'ignore_eos': true, 'top_k': 1}", ["ignore_eos", "top_k"], []),
        ("only field ignore_eos", ["ignore_eos"], ["ignore_eos"]),
    ],
)
def test_what_a_refusal_names(said: str, names: list[str], expected: list[str]) -> None:
    assert named_in(said, names) == expected


def test_fields_that_switch_are_not_fields_that_choose() -> None:
    fields = {**FIELDS, "generation_config": "{}", "stream_options": {"include_usage": True}}
    assert pins(fields) == ("repetition_penalty", "top_k", "generation_config")
    can = replace(DOCUMENTED, fields=fields)
    assert without(can, optional(can)) == Capabilities(
        cached_tokens=True, ignore_eos="none", usage_in_stream=False
    )


Mock = Callable[..., str]


@pytest.fixture
def mock() -> Iterator[Mock]:
    running = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-c", "import sys; from headway.mock_server.command import main"]
        command[-1] += "; sys.exit(main(sys.argv[1:]))"
        command += ["--ttft", "0", "--itl", "0", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        url: str = json.loads(process.stdout.readline())["base_url"]
        return url

    yield start
    for process in running:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_understood(mock: Mock, dialect: str) -> None:
    recipient = Recipient(Target.parse(mock("--dialect", dialect)), "mock", DOCUMENTED)
    found = transport.run(probe(recipient, SHORT, (odd.EOS,), LONG_TOKENS))
    assert found.can.ids_in
    assert found.can.usage_in_stream
    assert found.can.ids_out == (dialect in ("vllm", "headway"))
    assert [one for one in found.notices if "emits the end mark is documented, not proven" in one]
    assert len(found.notices) == (1 if found.can.ids_out else 2)


def test_a_mock_that_refuses_ignore_eos_is_asked_without_it(mock: Mock, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    body = '\'{"error": "ignore_eos: extra inputs are not permitted"}\''
    plan.write_text(f'[[fault]]\nkind = "refuse_ignore_eos"\nbody = {body}\n')
    recipient = Recipient(Target.parse(mock("--plan", str(plan))), "mock", DOCUMENTED)
    found = transport.run(probe(recipient, SHORT, (odd.EOS,), LONG_TOKENS))
    assert found.can.ignore_eos == "none"
    assert "ignore_eos is not sent to it: it answered 400" in found.notices[0]
