"""vLLM three ways, really run: its own server, AsyncLLM behind our host, and LLM.generate.

One launch of each, in float32, on tiny_recall, whose right answers are known in closed form. The
model is told that its answers end with the token that stands between all others, so that an
answer that goes on has emitted its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import environment, loadgen, transport
from headway.core import EngineInfo, Level, Request, RequestRecord
from headway.engines.endpoint import Endpoint, tail
from headway.engines.launch import LaunchSpec, launched
from headway.engines.models import tiny_recall
from headway.engines.models.folder import describe
from headway.engines.models.tiny_recall.task import THEN, recall_prompt
from headway.engines.servers import launcher_of
from headway.transport import Target

pytestmark = [pytest.mark.alone, pytest.mark.slow]
OUTPUT_TOKENS = 24
BLOCK_SIZE = 32
# What the three are told. Prefix caching is on in two and off in one.
ARGS = {"enforce_eager": True, "block_size": BLOCK_SIZE}
TOLD: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "vllm_serve": ({"max_num_seqs": 6, "enable_prefix_caching": True}, {}),
    "vllm": (
        {},
        {
            "max_num_seqs": 5,
            "max_num_batched_tokens": 256,
            "max_model_len": 448,
            "prefix_caching": False,
            "threads": 1,
        },
    ),
    "vllm_offline": ({"max_num_seqs": 7, "enable_prefix_caching": True}, {}),
}


@dataclasses.dataclass
class Served:
    """A running vLLM, who it says it is, and which processes are its own."""

    kind: str
    endpoint: Endpoint
    info: EngineInfo

    @property
    def caches(self) -> bool:
        return self.info.settings["prefix_caching"] is True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_recall, with another end of its answers."""
    path = tmp_path_factory.mktemp("models") / "tiny_recall"
    shutil.copytree(Path(tiny_recall.__file__).parent, path)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((path / name).read_text("utf-8"))
        (path / name).write_text(json.dumps({**fields, "eos_token_id": THEN}), "utf-8")
    return path


@pytest.fixture(scope="module", params=list(TOLD))
def served(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind: str = request.param
    try:
        python = environment.python_for(kind)
    except environment.NotHere as error:
        pytest.skip(str(error))
    args, equal = TOLD[kind]
    spec = LaunchSpec(
        instance=kind,
        kind=kind,
        model=describe(folder, "tiny_recall").to_json(),
        dtype="float32",
        device="cpu",
        python=python,
        log=tmp_path_factory.mktemp("logs") / "engine.log",
        args=ARGS | args,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        equal=equal,
    )
    with launched(spec) as endpoint:
        pids = endpoint.pids()
        assert len(pids) > 2  # ours or the server, vLLM's engine core, its worker
        yield Served(kind, endpoint, endpoint.info())
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not left, f"{kind} left running: {left}"


def prompts(seed: int, count: int) -> list[tuple[list[int], list[int]]]:
    return [recall_prompt(seed * 1000 + k, 60 + 37 * k % 240, OUTPUT_TOKENS) for k in range(count)]


def answers(
    served: Served, asked: list[list[int]], together: int, salt: str, ignore_eos: bool = True
) -> list[RequestRecord]:
    """Send prompts as a night does, so many at once."""
    recipient = loadgen.Recipient(
        Target.parse(served.endpoint.base_url),
        "tiny_recall",
        launcher_of(served.kind).can,
        salt=salt,
    )
    requests = [
        Request(index, tuple(ids), OUTPUT_TOKENS, ignore_eos=ignore_eos)
        for index, ids in enumerate(asked)
    ]
    share = loadgen.Share(
        recipient=recipient,
        requests=tuple(requests),
        level=Level("c", len(requests), concurrency=together),
        offsets_s=(),
        idle_timeout_s=60.0,
        timeout_s=120.0,
    )
    measured = transport.run(loadgen.measure(share))
    assert [record.error for record in measured.records] == [None] * len(asked)
    return list(measured.records)


@pytest.mark.parametrize("together", [1, 4, 8])
def test_greedy_tokens_are_the_right_ones_however_many_are_in_flight(
    served: Served, together: int
) -> None:
    asked = prompts(together, 2 * together)
    records = answers(served, [ids for ids, _ in asked], together, f"c{together}")
    for record, (ids, right) in zip(records, asked, strict=True):
        assert list(record.output_token_ids or ()) == right
        assert THEN in right  # the end of an answer, emitted
        assert (record.prompt_tokens, record.completion_tokens) == (len(ids), OUTPUT_TOKENS)
        assert record.finish_reason == "length"
        assert not record.warnings


def test_an_answer_ends_where_the_model_ends_it_unless_that_is_ignored(served: Served) -> None:
    ((ids, right),) = prompts(11, 1)
    (record,) = answers(served, [ids], 1, "eos", ignore_eos=False)
    assert list(record.output_token_ids or ()) == right[:2]
    assert record.finish_reason == "stop"


def test_prompts_are_found_in_the_cache_only_under_their_own_salt(served: Served) -> None:
    asked = prompts(12, 4)
    wholly = [(len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for ids, _ in asked]
    for salt, expected in (("a", [0] * 4), ("a", wholly), ("b", [0] * 4)):
        records = answers(served, [ids for ids, _ in asked], 4, salt)
        for record, (_, right) in zip(records, asked, strict=True):
            assert list(record.output_token_ids or ()) == right
        found = [record.cached_prompt_tokens for record in records]
        assert found == (expected if served.caches else [0] * 4)


def test_settings_are_read_back_from_the_engine(served: Served) -> None:
    args, equal = TOLD[served.kind]
    assert (served.info.kind, served.info.version) == (served.kind, "0.32.0")
    assert (served.info.model, served.info.dtype) == ("tiny_recall", "float32")
    assert served.info.device == "cpu"
    settings = served.info.settings
    for name, value in (ARGS | args | equal).items():
        assert settings["prefix_caching" if name == "enable_prefix_caching" else name] == value
    cores = len(os.sched_getaffinity(0))
    assert settings["threads"] == equal.get("threads", cores)
    assert settings["max_model_len"] == equal.get("max_model_len", 512)
    assert settings["compilation"] == "none"
    assert "libiomp5" in str(settings["preloaded"])
    blocks = settings["num_blocks"]
    assert isinstance(blocks, int)
    assert blocks > 1000


def test_its_own_stamps_lie_within_the_clients(served: Served) -> None:
    ((ids, _),) = prompts(13, 1)
    (record,) = answers(served, [ids], 1, "stamps")
    pieces = [event for event in record.events if event.token_ids]
    if served.kind == "vllm_serve":
        assert record.engine_arrived_s is None
        return
    stamps = [event.engine_at_s for event in pieces]
    assert record.engine_arrived_s is not None
    assert record.sent_s is not None
    times = [record.sent_s, record.engine_arrived_s]
    for event, stamp in zip(pieces, stamps, strict=True):
        assert stamp is not None
        assert times[1] <= stamp <= event.at_s
    assert times == sorted(times)
    assert sum(len(event.token_ids or ()) for event in pieces) == OUTPUT_TOKENS
    # Whoever comes late to AsyncLLM's stream, on a busy machine, gets several tokens at once.
    assert (len(pieces) == 1) == (served.kind == "vllm_offline")


def test_gauges_and_counters(served: Served) -> None:
    text = served.endpoint.get("/metrics")[1].decode()
    prefix = "vllm:" if served.kind == "vllm_serve" else "headway:"
    names = {"vllm:": ("kv_cache_usage_perc", "prefix_cache_hits_total", "num_preemptions_total")}
    names["headway:"] = ("kv_usage", "prefix_hits_total", "preemptions_total")
    for name in ("num_requests_running", "num_requests_waiting", *names[prefix]):
        assert f"\n{prefix}{name}" in text


def test_the_death_of_its_own_process_is_noticed(served: Served) -> None:
    """The last test of each launch: nothing works after it."""
    core = next(pid for pid in served.endpoint.pids() if "EngineCore" in command_line(pid))
    os.kill(core, signal.SIGKILL)
    assert served.endpoint.ends_within(60.0)
    if served.kind != "vllm_serve":
        said = tail(served.endpoint.spec.log, 1)
        assert re.search("engine process ended with status 1: .*EngineCore encountered", said)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text("utf-8", errors="replace")
