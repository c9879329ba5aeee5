"""llama.cpp's server without it: its command, what is made for it, and what it says of itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import loadgen
from headway.core import CHAT, COMPLETIONS, Request
from headway.engines.launcher import SETTINGS, LaunchError, LaunchSpec
from headway.engines.servers import launcher_of
from headway.engines.servers.llama_cpp import LLAMA_CPP
from headway.night import ModelFailure, RealLab, real
from headway.night.models import PreparedModel, make
from headway.suite import Instance
from headway.transport import Target

MODEL = {
    "name": "tiny",
    "path": "/m",
    "revision": "r",
    "vocab_size": 128,
    "special_ids": [0, 1, 2, 3],
    "eos_ids": [1],
    "context_length": 512,
    "synthetic": False,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("made") / "model.gguf"
    made.touch()
    return made


def spec(file: Path | None, **changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {"instance": "llama", "kind": "llama_cpp", "model": MODEL}
    fields |= {"dtype": "float32", "device": "cpu", "python": Path("/env/bin/python")}
    fields |= {"log": Path("log"), "made": None if file is None else str(file)}
    return LaunchSpec(**(fields | changes))


def options(asked: LaunchSpec) -> dict[str, str | None]:
    """Return the command's flags with their values; None for a flag alone."""
    program, *words = LLAMA_CPP.command(asked, 8123)
    found: dict[str, str | None] = {"program": program}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


def test_the_program_of_its_environment_serves_what_was_made_of_the_model(file):
    found = options(spec(file))
    assert found["program"] == "/env/bin/llama-server"
    assert found["--model"] == str(file)
    assert (found["--alias"], found["--host"], found["--port"]) == ("tiny", "127.0.0.1", "8123")
    assert {"--metrics", "--slots", "--offline", "--no-ui"} <= set(found)
    # As its vendor has it where the suite says nothing, but for the cache between levels.
    assert not {"--parallel", "--ctx-size", "--threads", "--batch-size"} & set(found)
    assert "--no-cache-prompt" in found
    assert found["--cache-ram"] == "0"


def test_a_program_and_a_file_of_the_user_s_own(file, tmp_path):
    own = tmp_path / "own.gguf"
    args = {"program": "/opt/llama-server", "gguf": str(own), "n_gpu_layers": 99}
    asked = spec(file, args=args)
    assert LLAMA_CPP.prepare(asked) is None
    with pytest.raises(LaunchError, match=r"llama has no GGUF file to run: .*own\.gguf"):
        LLAMA_CPP.command(asked, 1)
    own.touch()
    found = options(asked)
    assert (found["program"], found["--model"]) == ("/opt/llama-server", str(own))
    assert found["--n-gpu-layers"] == "99"
    assert not {"--program", "--gguf"} & set(found)


def test_the_model_is_written_before_the_first_launch_in_the_instance_s_dtype():
    words = LLAMA_CPP.prepare(spec(None, dtype="bfloat16"))
    assert words is not None
    assert words[0] == "headway.engines.models.to_gguf"
    assert words[-1] == "bfloat16"
    assert json.loads(words[2]) == MODEL
    with pytest.raises(LaunchError, match="none was made"):
        LLAMA_CPP.command(spec(None), 1)


def test_a_model_that_cannot_be_written_says_so_before_the_night(tmp_path):
    words = LLAMA_CPP.prepare(spec(None, model=MODEL | {"synthetic": True}))
    assert words is not None
    with pytest.raises(ModelFailure, match=r"the model of a cannot be prepared: .*no weights on"):
        make(words, "the model of a", Path(sys.executable), tmp_path, lambda text: None)


def test_a_night_has_it_written_once_and_starts_with_it(factory, tmp_path, file, monkeypatch):
    instances = tuple(
        Instance(name, kind, "tiny", "float32") for name, kind in (("a", "llama_cpp"), ("b", "x"))
    )
    suite = factory.make_suite(("a",))
    python, asked = Path("/hf/bin/python"), []

    def made(words, what, *where):
        asked.append((words[0], what, *where[:2]))
        return str(file)

    monkeypatch.setattr(real, "make", made)
    lab = RealLab(
        tmp_path,
        suite,
        "cpu",
        {"tiny": PreparedModel(MODEL, None)},
        {name: real.Start(Path("/env/bin/python")) for name in "ab"},
        reference_python=lambda model: python,
    )
    lab.prepare(instances, tmp_path)
    module = "headway.engines.models.to_gguf"
    assert asked == [(module, "the model of a", python, tmp_path)]
    started = [lab._spec(instance, "log") for instance in instances]
    assert [one.made for one in started] == [str(file), None]
    assert options(started[0])["--model"] == str(file)


@given(st.none() | st.integers(1, 64), st.none() | st.integers(1, 4096))
def test_each_slot_gets_the_length_that_a_sequence_may_have(file, slots, length):
    equal = {"max_num_seqs": slots, "max_model_len": length}
    found = options(spec(file, equal={k: v for k, v in equal.items() if v is not None}))
    if slots is None and length is None:
        assert "--ctx-size" not in found
        return
    assert int(found["--ctx-size"]) == int(found["--parallel"]) * (length or 512)
    assert slots is None or found["--parallel"] == str(slots)
    assert "--no-kv-unified" in found


def test_all_that_engines_may_share_it_has(file):
    assert set(LLAMA_CPP.equal) == set(SETTINGS)
    equal = {"max_num_batched_tokens": 256, "threads": 2, "prefix_caching": True}
    found = options(spec(file, equal=equal))
    assert (found["--batch-size"], found["--threads"]) == ("256", "2")
    assert "--cache-prompt" in found
    assert not {"--no-cache-prompt", "--cache-ram"} & set(found)
    assert options(spec(file, equal=equal, args={"threads": 1}))["--threads"] == "1"


@pytest.mark.parametrize(("dtype", "cache"), [("float32", "f32"), ("bfloat16", None)])
def test_in_fp32_its_cache_is_fp32_too(file, dtype, cache):
    found = options(spec(file, dtype=dtype))
    assert found.get("--cache-type-k") == found.get("--cache-type-v") == cache


def sent(request: Request) -> tuple[bytes, dict[str, Any]]:
    recipient = loadgen.Recipient(Target("h", 1), "m", launcher_of("llama_cpp").can)
    head, _, body = loadgen.payload(request, recipient).partition(b"\r\n\r\n")
    return head, json.loads(body)


def test_ids_go_to_the_endpoint_that_gives_them_back():
    head, body = sent(Request(0, (5, 6), 7))
    line = head.split(b"\r\n")[0]
    assert line == b"POST /completion HTTP/1.1"
    assert b"\r\nConnection: close" in head
    assert (body["prompt"], body["ignore_eos"], body["temperature"]) == ([5, 6], True, 0.0)
    assert (body["top_k"], body["samplers"]) == (1, ["top_k", "temperature", "top_p"])
    assert sent(Request(0, (5,), 7, endpoint=CHAT, texts=("a",)))[0].startswith(b"POST /v1/chat/")
    own = Request(0, (), 7, body='{"prompt": "a"}', endpoint=COMPLETIONS)
    assert sent(own)[0].startswith(b"POST /v1/completions HTTP/1.1")


def test_what_is_sampled_is_sampled_from_all_ids():
    assert sent(Request(0, (5,), 7, temperature=0.7))[1]["top_k"] == 0


LOG = """
0.00.01 I system_info: n_threads = 1 (n_threads_batch = 1) / 2 | CPU : AVX2 = 1 |
0.00.01 I system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : AVX2 = 1 |
llama_context: n_ctx_seq             = 512
llama_context: n_batch               = 2048
llama_context: n_ubatch              = 256
llama_context: flash_attn            = auto
llama_context: kv_unified            = false
resolve_fused_ops: Flash Attention enabled
llama_kv_cache: size =    1.00 MiB (   512 cells,   2 layers,  8/8 seqs), K (f32):    1 MiB, V (f32)
"""


class Running:
    """What llama-server answers, as `info` asks it."""

    def __init__(self, folder: Path, log: str = LOG, cached: int = 0, **changes: Any) -> None:
        ftype = changes.pop("ftype", "all F32")
        self.spec = spec(None, log=folder / "log", **changes)
        self.spec.log.write_text(log)
        settings = {"n_ctx": 512, "params": {}}
        props = {"total_slots": 8, "default_generation_settings": settings, "model_ftype": ftype}
        self.answers = {
            "/props": props | {"build_info": "b0-0c1e570"},
            "/v1/models": {"data": [{"id": "tiny"}]},
        }
        self.cached = cached
        self.asked: list[dict[str, Any]] = []

    def get_json(self, path: str) -> Any:
        return self.answers[path]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        assert path == "/completion"
        assert not set(body["prompt"]) & set(MODEL["special_ids"])
        self.asked.append(body)
        bias = [{"bias": None, "token": 2}, {"bias": None, "token": 1}]
        return {
            "generation_settings": {"logit_bias": bias if body["ignore_eos"] else []},
            "timings": {"cache_n": self.cached if len(self.asked) > 1 else 0},
        }


def test_who_answers_is_read_back(tmp_path):
    info = LLAMA_CPP.info(Running(tmp_path))
    assert (info.kind, info.version, info.model) == ("llama_cpp", "0c1e570", "tiny")
    assert (info.dtype, info.device, info.banned_ids) == ("float32", "cpu", (1, 2))
    assert info.settings == {
        "max_num_seqs": 8,
        "max_model_len": 512,
        "file_type": "all F32",
        "max_num_batched_tokens": 2048,
        "physical_batch": 256,
        "threads": 2,  # the log's last word
        "flash_attention": "enabled",
        "kv_cache_type": "f32",
        "kv_unified": "false",
        "prefix_caching": False,
    }


def test_a_cache_shows_and_so_does_a_gpu(tmp_path):
    log = LOG + "load_tensors: offloaded 3/3 layers to GPU\n"
    info = LLAMA_CPP.info(Running(tmp_path, log, cached=15))
    assert info.settings["prefix_caching"] is True
    assert info.device == "cuda"
    assert LLAMA_CPP.info(Running(tmp_path, LOG + "offloaded 0/3 layers to GPU")).device == "cpu"


@pytest.mark.parametrize(
    ("args", "ftype", "dtype"),
    [
        ({}, "BF16", "bfloat16"),
        ({}, "F16", "float16"),
        ({}, "Q4_1", "Q4_1"),  # not what was asked for: the night refuses it
        ({"gguf": "/own"}, "Q4_1", "float32"),  # judged by what the suite says
    ],
)
def test_the_dtype_is_that_of_the_file(tmp_path, args, ftype, dtype):
    info = LLAMA_CPP.info(Running(tmp_path, args=args, ftype=ftype))
    assert (info.dtype, info.settings["file_type"]) == (dtype, ftype)
