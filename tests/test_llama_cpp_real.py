"""llama.cpp's own server, really run, where its environment has been made on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway import correctness, environment, loadgen, night, transport
from headway.core import Level, Request, RequestRecord
from headway.engines.launch import Endpoint, LaunchSpec, launched, port_owners
from headway.engines.models import tiny_recall
from headway.engines.models.tiny_recall.task import EOS, recall_prompt
from headway.night.models import make
from headway.transport import Target

HOME = environment.default_home()
MADE = environment.plan(environment.environments()["llama_cpp"], HOME).made
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not MADE, reason="llama.cpp is not here: headway env make llama_cpp"),
]
MODEL = tiny_recall.prepare()
TOKENS, SLOTS = 24, 4


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Endpoint]:
    """One server for the module, on tiny_recall in fp32, with four slots."""
    folder = tmp_path_factory.mktemp("llama")
    asked = LaunchSpec(
        instance="llama",
        kind="llama_cpp",
        model=MODEL.to_json(),
        dtype="float32",
        device="cpu",
        python=environment.python_for("llama_cpp"),
        log=folder / "llama.log",
        args={"parallel": SLOTS, "max_model_len": 512, "threads": 1},
        start_timeout_s=60.0,
    )
    from headway.engines.servers.llama_cpp import LLAMA_CPP

    words = LLAMA_CPP.prepare(asked)
    assert words is not None
    python = environment.python_for("reference")
    made = make(words, "the test's model", python, folder, lambda text: None)
    fields = {name: getattr(asked, name) for name in LaunchSpec.__slots__}
    with launched(LaunchSpec(**{**fields, "made": made})) as endpoint:
        yield endpoint


def drive(running: Endpoint, requests: list[Request], at_once: int) -> tuple[RequestRecord, ...]:
    """Send requests as a night does, so many at once."""
    can = running.launcher.can
    recipient = loadgen.Recipient(Target.parse(running.base_url), MODEL.name, can)
    share = loadgen.Share(
        recipient=recipient,
        requests=tuple(requests),
        level=Level("c", len(requests), concurrency=at_once),
        offsets_s=(0.0,) * at_once,
        idle_timeout_s=30.0,
        timeout_s=60.0,
        think_s=0.0,
    )
    return transport.run(loadgen.measure(share)).records


@pytest.mark.parametrize("at_once", [1, 4, 8])  # more than it has slots, too
def test_each_id_is_the_right_one_alone_and_among_others(running, at_once):
    tasks = [recall_prompt(seed, 40 + 13 * seed) for seed in range(16)]
    asked = [Request(k, tuple(prompt), TOKENS) for k, (prompt, _) in enumerate(tasks)]
    for record, (prompt, right) in zip(drive(running, asked, at_once), tasks, strict=True):
        assert record.error is None
        assert record.output_token_ids == tuple(right[:TOKENS])
        assert (record.prompt_tokens, record.completion_tokens) == (len(prompt), TOKENS)
        assert (record.finish_reason, record.cached_prompt_tokens) == ("length", 0)
        assert record.warnings == ()


def test_it_says_who_it_is(running):
    info = running.info()
    assert (info.kind, info.model, info.dtype, info.device) == (
        "llama_cpp",
        "tiny_recall",
        "float32",
        "cpu",
    )
    assert info.version == "0c1e57098"
    assert info.banned_ids == (EOS,)
    want = {"max_num_seqs": SLOTS, "max_model_len": 512, "threads": 1, "prefix_caching": False}
    want |= {"kv_cache_type": "f32", "file_type": "all F32", "flash_attention": "enabled"}
    assert want.items() <= info.settings.items()


def test_an_end_is_banned_where_it_is_to_be_ignored_and_else_ends(running):
    prompt, right = recall_prompt(3, 64)
    wanted = {"prompt": prompt, "n_predict": 8, "return_tokens": True, "temperature": 0.0}
    wanted |= {"logit_bias": [[EOS, 50.0]]}
    ended = running.post("/completion", wanted)
    assert (ended["tokens"], ended["stop_type"]) == ([EOS], "eos")
    went_on = running.post("/completion", wanted | {"ignore_eos": True})
    assert (went_on["tokens"], went_on["stop_type"]) == (right[:8], "limit")


def test_words_of_a_text_become_their_ids(running):
    ids = [7, 99, 4, 127]
    text = "".join(f"<{id}>" for id in ids)
    assert running.post("/tokenize", {"content": text}) == {"tokens": ids}


def test_nothing_is_left_of_it(tmp_path, running):
    """Told to end, it ends: no process, no port, though an answer is on its way."""
    port = urlsplit(running.base_url).port
    (pid,) = [pid for pid in running.pids() if _name(pid) == "llama-server"]
    assert port_owners(port) == {pid}
    os.kill(pid, signal.SIGTERM)
    assert running.ends_within(10.0)
    deadline = time.monotonic() + 10.0
    while port_owners(port) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert port_owners(port) == set()
    assert _name(pid) is None
    assert not running.pids()


def _name(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


SUITE = """
[suite]
description = "llama.cpp beside transformers"
model = "smollm2_135m"
dtype = "float32"
launches = 1
seed = 1
idle_timeout_s = 60
calibrate = false

[engine.llama]
kind = "llama_cpp"
args = { parallel = 4, max_model_len = 256, threads = 1 }

[workload.w]
prompt_tokens = 32
output_tokens = 8
concurrency = [4]

"""


@pytest.mark.slow
def test_a_night_on_smollm2_is_verified_token_for_token(workspace: Any) -> None:
    """Through the shipped command: written as GGUF, started, measured, verified under its ban."""
    home = workspace.folder / "home"
    home.mkdir()
    for name in ("envs", "models"):
        (HOME / name).mkdir(exist_ok=True)
        (home / name).symlink_to(HOME / name)
    (workspace.folder / "suites" / "llama.toml").write_text(SUITE)
    done = workspace.run("run", "llama")
    assert done.code == 0, done.text
    _, results = night.read(done.night)
    (banned,) = {pair.banned for pair in correctness.pairs(results, "smollm2_135m")}
    assert {0, 2} <= set(banned)  # and what it takes for an end by its text, as <reponame>
    for run in results.runs:
        found = correctness.equality(results, run.case)
        assert found.wrong == found.unverified == ()
        assert found.right == run.level.num_requests
