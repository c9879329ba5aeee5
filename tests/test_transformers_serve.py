"""`transformers serve` as an engine: its command, what it understands, and really running it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway import environment, loadgen, transport
from headway.core import COMPLETIONS, Level, Request, RequestRecord
from headway.engines.endpoint import Endpoint
from headway.engines.launch import LaunchError, LaunchSpec, launched, port_owners
from headway.engines.models import prepare
from headway.engines.models.tiny_recall.task import EOS, THEN, recall_prompt
from headway.engines.servers import launcher_of
from headway.engines.servers.transformers_serve import SERVE
from headway.transport import Target
from headway.workload import in_text

TOKENS = 16


def spec(**changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {"instance": "serve", "kind": "transformers_serve"}
    fields |= {"model": {"name": "m", "path": "/m"}, "dtype": "float32", "device": "cpu"}
    return LaunchSpec(**(fields | {"python": Path("python"), "log": Path("log")} | changes))


def command(**changes: Any) -> list[str]:
    assert SERVE.command is not None
    return SERVE.command(spec(**changes), 8123)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_its_own_flags_come_from_the_suite_and_a_cpu_is_not_filled_with_cache():
    words = command(args={"cb_num_blocks": 9, "compile": True, "attn_implementation": "sdpa"})
    assert (value(words, "--host"), value(words, "--port")) == ("127.0.0.1", "8123")
    assert (value(words, "--dtype"), value(words, "--device")) == ("float32", "cpu")
    assert {"--continuous-batching", "--compile"} <= set(words)
    assert value(words, "--cb-num-blocks") == "9"
    assert value(words, "--cb-max-batch-tokens") == "1024"
    assert value(words, "--attn-implementation") == "sdpa"
    assert json.loads(value(words, "--more")) == {"auto_switch_to_flash": False}
    assert "--more" not in command(dtype="bfloat16")
    assert "--cb-num-blocks" not in command(device="cuda")
    assert "--no-continuous-batching" in command(args={"continuous_batching": False})


def test_what_it_has_no_flag_for_reaches_its_configuration():
    equal = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "prefix_caching": False}
    words = command(equal=equal | {"threads": 2})
    more = {"max_requests_per_batch": 8, "allow_block_sharing": False}
    assert more.items() <= json.loads(value(words, "--more")).items()
    assert value(words, "--cb-max-batch-tokens") == "256"
    assert value(words, "--threads") == "2"


def test_a_model_without_weights_is_refused():
    with pytest.raises(LaunchError, match="and m has none"):
        command(model={"name": "m", "path": "/m", "synthetic": True})


def body(request: Request) -> dict[str, Any]:
    recipient = loadgen.Recipient(Target("h", 1), "m", SERVE.can)
    sent: dict[str, Any] = json.loads(loadgen.payload(request, recipient).partition(b"\r\n\r\n")[2])
    return sent


def test_only_what_it_knows_is_sent_and_the_end_is_ignored_by_its_own_means():
    request = in_text(Request(0, (5,), 4), (5,), "<5>", "text")
    sent = body(request)
    assert set(sent) == {
        *("model", "prompt", "max_tokens", "temperature", "top_p", "stream", "stream_options"),
        *("frequency_penalty", "generation_config"),
    }
    assert json.loads(sent["generation_config"]) == {"do_sample": False, "eos_token_id": -1}
    natural = in_text(Request(0, (5,), 4, ignore_eos=False), (5,), "<5>", "text")
    assert set(sent) - set(body(natural)) == {"generation_config"}


# Really run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return tiny_recall, which ends its answers with `<then>`: each is of two tokens."""
    made = prepare("tiny_recall", tmp_path_factory.mktemp("home"))
    here = tmp_path_factory.mktemp("model")
    for file in made.path.iterdir():
        if file.is_file():
            (here / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        config = json.loads((here / name).read_text())
        assert config["eos_token_id"] == EOS
        # What a model's own configuration would change, unless it is pinned.
        more = {"repetition_penalty": 5.0} if name == "generation_config.json" else {}
        (here / name).write_text(json.dumps(config | more | {"eos_token_id": THEN}))
    return made.to_json() | {"path": str(here), "name": "ending/recall", "eos_ids": [THEN]}


@pytest.fixture(scope="module")
def endpoint(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    hf = environment.python_for("transformers_serve")
    log = tmp_path_factory.mktemp("logs") / "serve.log"
    args = {"threads": 1, "cb_num_blocks": 32, "cb_max_batch_tokens": 256, "cb_block_size": 16}
    asked = spec(model=folder, python=hf, log=log, args=args, start_timeout_s=300.0)
    with launched(asked) as running:
        pids, port = running.pids(), urlsplit(running.base_url).port or 0
        assert pids
        assert port_owners(port) <= set(pids)
        yield running
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < 30
    assert port_owners(port) == set()
    assert not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def answers(
    endpoint: Endpoint, together: int, ignore_eos: bool = True, n: int = 8, length: int = 40
) -> list[RequestRecord]:
    requests = []
    for k in range(n):
        prompt, _ = recall_prompt(k, length + k, TOKENS)
        asked = Request(k, tuple(prompt), TOKENS, ignore_eos)
        text = "".join(f"<{id}>" for id in prompt)
        requests.append(in_text(asked, prompt, text, "text"))
    recipient = loadgen.Recipient(
        Target.parse(endpoint.base_url), endpoint.spec.served_name, endpoint.launcher.can
    )
    level = Level(f"c{together}", n, concurrency=together)
    share = loadgen.Share(recipient, tuple(requests), level, (0.0,) * together)
    return list(transport.run(loadgen.measure(share)).records)


def text_of(record: RequestRecord) -> str:
    return "".join(event.text for event in record.events)


@pytest.mark.slow
def test_it_says_who_it_is_and_serves_the_model_by_its_name(endpoint: Endpoint) -> None:
    answers(endpoint, 1, n=1)  # its continuous batching begins with the first request
    info = endpoint.info()
    assert (info.kind, info.model, info.dtype) == ("transformers_serve", "ending/recall", "float32")
    assert info.device == "cpu"
    assert info.version == info.versions["transformers"]
    expected = {"threads": 1, "num_blocks": 32, "max_num_batched_tokens": 256, "page_size": 16}
    expected |= {"continuous_batching": True, "prefix_caching": True, "attention": "sdpa"}
    assert expected.items() <= info.settings.items()


@pytest.mark.slow
def test_outputs_are_the_same_text_at_1_4_and_8_in_flight(endpoint: Endpoint) -> None:
    for together in (1, 4, 8):
        for k, record in enumerate(answers(endpoint, together)):
            prompt, right = recall_prompt(k, 40 + k, TOKENS)
            assert record.error is None
            assert text_of(record) == "".join(f"<{id}>" for id in right)
            assert (record.prompt_tokens, record.completion_tokens) == (len(prompt), TOKENS)
            assert record.finish_reason == "length"
            assert record.output_token_ids is None


@pytest.mark.slow
def test_natural_ends_are_honoured_beside_those_that_are_ignored(endpoint: Endpoint) -> None:
    for record in answers(endpoint, 4, ignore_eos=False):
        assert (record.completion_tokens, record.finish_reason) == (2, "stop")


@pytest.mark.slow
def test_its_prefix_cache_is_emptied(endpoint: Endpoint) -> None:
    """Prompts of more than a block, answered again: the same, with and without the blocks."""
    first = [text_of(one) for one in answers(endpoint, 2, n=3, length=100)]
    assert SERVE.reset is not None
    assert [endpoint.post(SERVE.reset, {})["emptied"] for _ in range(2)] == [True, False]
    assert [text_of(one) for one in answers(endpoint, 2, n=3, length=100)] == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"ignore_eos": True}, 422, "Unexpected fields"),
        ({"prompt": [5, 6]}, 400, "prompt must be a string"),
        ({"model": "another"}, 400, "Server is pinned to 'ending/recall'"),
    ],
)
def test_what_it_does_not_take_it_refuses(endpoint: Endpoint, changes, status, said) -> None:
    asked = {"model": "ending/recall", "prompt": "<5>", "max_tokens": 1} | changes
    with pytest.raises(LaunchError, match=said) as caught:
        endpoint.post(COMPLETIONS, asked)
    assert f"answered {status}" in str(caught.value)


@pytest.mark.slow
def test_the_first_request_decides_whether_anything_is_sampled(endpoint: Endpoint) -> None:
    """Why a suite that samples is refused: the server takes it, and answers greedily."""
    asked = {"model": "ending/recall", "prompt": "<20><30>", "max_tokens": 8, "seed": 1}
    texts = {
        endpoint.post(COMPLETIONS, asked | {"temperature": heat})["choices"][0]["text"]
        for heat in (0.0, 5.0)
    }
    assert len(texts) == 1
    assert not launcher_of("transformers_serve").can.sampling
