"""How vLLM is started, and what it says of itself: command lines, variables, recorded answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.endpoint import Endpoint, telling
from headway.engines.launcher import SETTINGS, LaunchError, LaunchSpec
from headway.engines.servers import launcher_of
from headway.engines.servers.vllm_readback import count_cores, preloaded

KINDS = ("vllm_serve", "vllm", "vllm_offline")
EQUAL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 1024,
    "prefix_caching": False,
    "threads": 1,
}
# What /server_info of vLLM 0.32.0 said on a CPU, cut down to what is read.
SAID: dict[str, Any] = {
    "vllm_config": {
        "model_config": {
            "dtype": "torch.float32",
            "max_model_len": 512,
            "enforce_eager": True,
            "served_model_name": "tiny_recall",
            "quantization": None,
            "seed": 0,
        },
        "cache_config": {
            "block_size": 128,
            "enable_prefix_caching": True,
            "cache_dtype": "auto",
            "num_gpu_blocks": 8192,
        },
        "scheduler_config": {
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
            "enable_chunked_prefill": True,
            "async_scheduling": False,
        },
        "parallel_config": {"tensor_parallel_size": 1},
        "compilation_config": {"mode": 2, "backend": "inductor"},
        "attention_config": {"backend": None},
        "speculative_config": None,
        "device_config": {"device": "cpu"},
    },
    "vllm_env": {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": 1},
    "system_env": {
        "python_version": "3.11.7 (main, May  9 2026, 07:35:25) [GCC 12.2.0] (64-bit runtime)",
        "pip_packages": "numpy==2.3.5\ntorch==2.13.0+cpu\ntransformers==5.19.0",
    },
}


def spec(kind: str = "vllm_serve", **changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {"instance": "a", "kind": kind, "model": {"name": "m", "path": "/m"}}
    fields |= {"dtype": "float32", "device": "cpu", "python": Path("/e/bin/python")}
    return LaunchSpec(**(fields | {"log": Path("log")} | changes))


def command(launch: LaunchSpec) -> list[str]:
    made = launcher_of(launch.kind).command
    assert made is not None
    return made(launch, 8000)


def env(launch: LaunchSpec) -> dict[str, str]:
    return dict(launcher_of(launch.kind).env(launch))


def said(answers: dict[str, Any]) -> Endpoint:
    """An endpoint that was recorded."""

    class Recorded(Endpoint):
        def get_json(self, path: str, timeout_s: float = 10.0) -> Any:
            return answers[path]

    return Recorded(spec(), launcher_of("vllm_serve"), "http://127.0.0.1:1", None, 0.0)


def test_the_servers_command_line() -> None:
    words = command(spec(args={"max_num_seqs": 4, "enforce_eager": True, "threads": 2}))
    assert words[:3] == ["/e/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    line = " ".join(words)
    for part in (
        "--model /m --served-model-name m --dtype float32",
        "--host 127.0.0.1 --port 8000",
        "--generation-config vllm",
        "--disable-uvicorn-access-log",
        "--max-num-seqs 4 --enforce-eager",
    ):
        assert part in line
    assert "threads" not in line  # vLLM has no such flag


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tuning_knows_every_setting_and_the_suites_own_come_last(kind: str) -> None:
    assert set(EQUAL) == set(SETTINGS)
    launch = spec(kind, equal=EQUAL, args={"max_num_seqs": 3})
    if kind == "vllm_serve":
        line = " ".join(command(launch))
        assert "--max-num-seqs 3 --max-num-batched-tokens 512 --max-model-len 1024" in line
        assert "--no-enable-prefix-caching" in line
    else:
        words = command(launch)
        assert json.loads(words[words.index("--args") + 1]) == {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 512,
            "max_model_len": 1024,
            "enable_prefix_caching": False,
            "threads": 1,
        }
    assert len(env(launch)["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_it_has_all_our_cores_and_a_share_of_the_memory(kind: str) -> None:
    variables = env(spec(kind))
    cores = variables["VLLM_CPU_OMP_THREADS_BIND"]
    assert cores == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert count_cores(cores) == len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 1 <= int(variables["VLLM_CPU_KVCACHE_SPACE"]) <= max(1, memory_gib / 4)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env(spec(kind, args={"kv_cache_memory_bytes": 1 << 30}))
    on_gpu = env(spec(kind, device="cuda"))
    assert not {name for name in on_gpu if "CPU" in name or "PRELOAD" in name}


def test_what_is_loaded_first_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    launch = spec(python=tmp_path / "bin" / "python")
    assert "LD_PRELOAD" not in env(launch)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert env(launch)["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.4")
    assert env(launch)["LD_PRELOAD"].startswith("libtcmalloc_minimal.so.4:/")


def test_weights_must_be_on_disk() -> None:
    with pytest.raises(LaunchError, match="and m has none"):
        command(spec(model={"name": "m", "path": "/m", "synthetic": True}))


def test_who_answers_is_read_back() -> None:
    recorded = {"/server_info?config_format=json": SAID, "/version": {"version": "0.32.0"}}
    info = launcher_of("vllm_serve").info(said(recorded))
    assert (info.kind, info.version, info.model) == ("vllm_serve", "0.32.0", "tiny_recall")
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.versions == {
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "python": "3.11.7",
    }
    assert {name: info.settings[name] for name in SETTINGS} == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "max_model_len": 512,
        "prefix_caching": True,
        "threads": 2,
    }
    assert info.settings["compilation"] == "dynamo_trace_once inductor"
    assert info.settings["num_blocks"] == 8192


def test_on_a_gpu_nothing_is_said_of_threads() -> None:
    config = SAID["vllm_config"] | {"device_config": {"device": None, "device_type": "cuda"}}
    recorded = {
        "/server_info?config_format=json": SAID | {"vllm_config": config},
        "/version": {"version": "0.33.0"},
    }
    info = launcher_of("vllm_serve").info(said(recorded))
    assert info.device == "cuda"
    assert "threads" not in info.settings


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 30)), min_size=1, max_size=5))
def test_cores_are_counted_as_they_are_written(ranges: list[tuple[int, int]]) -> None:
    written = ",".join(f"{a}-{a + n}" if n else f"{a}" for a, n in ranges)
    assert count_cores(written) == sum(n + 1 for _, n in ranges)
    assert count_cores("auto") is None
    assert count_cores("nobind") is None


def test_libraries_are_seen_in_a_process_that_has_them() -> None:
    assert preloaded([]) == ""
    assert preloaded([os.getpid(), 2**22]) == ""


def test_capabilities_of_our_own_host_and_of_vllms() -> None:
    serve, hosted = launcher_of("vllm_serve"), launcher_of("vllm")
    assert serve.can.salt == hosted.can.salt == "cache_salt"
    assert hosted.can.hosted
    assert not hosted.can.steps
    assert not serve.can.hosted
    assert serve.can.fields["repetition_penalty"] == 1.0
    assert serve.reset == "/reset_prefix_cache"


CORE_FAILED = """\
(APIServer pid=1) INFO 11-30 14:12:00 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) ERROR 11-30 14:12:35 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-30 14:12:35 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-30 14:12:35 [core.py:1510]   File "core.py", line 1482, in run
(EngineCore pid=2) ERROR 11-30 14:12:35 [core.py:1510]     engine_core = EngineCoreProc(*args)
(EngineCore pid=2) ERROR 11-30 14:12:35 [core.py:1510] ValueError: No memory for cache blocks.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1
  warnings.warn('resource_tracker: There appear to be %d '
"""
REFUSED = """\
Traceback (most recent call last):
  File "_dataclasses.py", line 121, in __init__
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
UNKNOWN_FLAG = (
    "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --max-num\n"
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CORE_FAILED, "ValueError: No memory for cache blocks."),
        (REFUSED, "ModelConfig Value error, User-specified max_model_len (100000) is greater"),
        (UNKNOWN_FLAG, "api_server.py: error: unrecognized arguments: --max-num"),
        ("Traceback (most recent call last):\n  File", "Traceback (most recent call last):"),
        ("", ""),
    ],
)
def test_the_cause_is_the_first_error_in_the_log(tmp_path: Path, log: str, cause: str) -> None:
    (tmp_path / "log").write_text(log, "utf-8")
    assert cause in telling(tmp_path / "log")
    assert "initialization failed" not in telling(tmp_path / "log")
