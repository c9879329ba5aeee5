"""Launchers of others' servers: their commands, fields and read-back, checked against what the
released servers themselves say (tests/golden/servers)."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway import loadgen
from headway.core import CHAT, EngineInfo, Request
from headway.engines.launcher import SETTINGS, Launcher, LaunchError, LaunchSpec
from headway.engines.servers import launcher_of
from headway.engines.servers.dialects import DIALECTS
from headway.engines.servers.given import PLACEHOLDERS
from headway.night import real
from headway.transport import Target

GOLDEN = Path(__file__).parent / "golden" / "servers"
EQUAL = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 256}
EQUAL |= {"prefix_caching": False}
DIGEST = "repo/name@sha256:" + 64 * "0"


def said(project: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"{project}.json").read_text())
    return found


def spec(kind: str, **changes: Any) -> LaunchSpec:
    fields: dict[str, Any] = {"instance": "a", "kind": kind, "model": {"name": "m", "path": "/mo"}}
    fields |= {"dtype": "bfloat16", "device": "cuda:0", "python": Path("/venv/bin/python")}
    return LaunchSpec(**(fields | {"log": Path("/logs/a.log")} | changes))


def command(asked: LaunchSpec, port: int = 8123) -> list[str]:
    made = launcher_of(asked.kind, asked.args).command
    assert made is not None
    return made(asked, port)


def unknown_flags(words: list[str], project: str) -> list[str]:
    return [word for word in words if word.startswith("--") and word not in said(project)["flags"]]


def body(can: Any, request: Request) -> dict[str, Any]:
    """The JSON of a request as it is sent to a server that understands this."""
    to = loadgen.Recipient(Target("127.0.0.1", 1), "m", can, salt="s")
    sent: dict[str, Any] = json.loads(loadgen.payload(request, to).partition(b"\r\n\r\n")[2])
    return sent


def unknown_fields(can: Any, project: str) -> list[str]:
    """What a server does not know of all that we send it, to either endpoint."""
    known, found = said(project), []
    ids = Request(0, (1, 2), 4, seed=3, temperature=0.5, top_p=0.9)
    chat = Request(0, (1, 2), 4, endpoint=CHAT, texts=("hello",))
    for one, names in ((ids, known["completions"]), (chat, known["chat"])):
        sent = body(can, one)
        found += [name for name in sent if name not in names]
        found += [n for n in sent["stream_options"] if n not in known["stream_options"]]
    return found


@pytest.mark.parametrize("kind", ["sglang", "tensorrt_llm"])
def test_every_flag_is_one_of_the_released_server(kind: str) -> None:
    for changes in ({}, {"equal": EQUAL}, {"image": DIGEST}):
        assert unknown_flags(command(spec(kind, **changes)), kind) == []
    misspelt = {"max_runing_requests": 3} if kind == "sglang" else {"max_batchsize": 3}
    (found,) = unknown_flags(command(spec(kind, args=misspelt)), kind)
    assert found.replace("-", "").replace("_", "") == f"{next(iter(misspelt))}".replace("_", "")


@pytest.mark.parametrize("project", ["vllm", "sglang", "tensorrt_llm"])
def test_every_field_of_a_request_is_one_of_the_released_server(project: str) -> None:
    can = DIALECTS[project]
    assert unknown_fields(can, project) == []
    misspelt = replace(can, fields={**can.fields, "ignore_eso": True})
    assert unknown_fields(misspelt, project) == ["ignore_eso", "ignore_eso"]


def test_a_field_of_completions_only_is_not_sent_to_chat() -> None:
    """What this catches: a server that refuses what it does not know refuses the whole request."""
    everywhere = replace(DIALECTS["tensorrt_llm"], fields={"detokenize": False})
    assert unknown_fields(everywhere, "tensorrt_llm") == ["detokenize"]


def test_a_server_that_wants_a_top_p_below_one_is_not_told_one() -> None:
    tgi = DIALECTS["tgi"]
    assert "top_p" not in body(tgi, Request(0, (), 4, texts=("hello",)))
    assert body(tgi, Request(0, (), 4, top_p=0.9, texts=("hello",)))["top_p"] == 0.9
    assert body(DIALECTS["openai"], Request(0, (), 4, texts=("hello",)))["top_p"] == 1.0


def test_only_what_is_understood_is_sent() -> None:
    """The common denominator: no ids asked for, nothing of any one server's."""
    sent = body(DIALECTS["openai"], Request(0, (), 4, texts=("hello",)))
    openai = {"model", "prompt", "max_tokens", "temperature", "top_p", "stream", "stream_options"}
    assert set(sent) - openai == {"presence_penalty", "frequency_penalty"}


def test_sglang_is_started_with_what_is_asked_for_and_its_own_arguments_last() -> None:
    words = command(spec("sglang", args={"port": 1, "disable_radix_cache": True}))
    assert words[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]
    pairs = dict(zip(words[3::2], words[4::2], strict=False))
    assert pairs["--model-path"] == "/mo"
    assert pairs["--served-model-name"] == "m"
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--device"] == "cuda"
    assert words[words.index("--port") + 1] == "1"
    assert words[-1] == "--disable-radix-cache"


@pytest.mark.parametrize(
    ("caching", "flag"), [(True, []), (False, ["--disable-radix-cache"])], ids=["on", "off"]
)
def test_a_setting_whose_name_means_the_opposite_is_turned_round(
    caching: bool, flag: list[str]
) -> None:
    plain = command(spec("sglang"))
    words = command(spec("sglang", equal={"prefix_caching": caching}))
    assert [word for word in words if word not in plain] == flag


def test_tensorrt_llm_runs_beside_its_python_and_reads_the_rest_from_a_file() -> None:
    asked = spec(
        "tensorrt_llm", equal=EQUAL, args={"config": {"kv_cache_config": {"dtype": "fp8"}}}
    )
    words = command(asked)
    assert words[:2] == ["/venv/bin/trtllm-serve", "/mo"]
    pairs = dict(zip(words[2::2], words[3::2], strict=True))
    assert pairs["--extra_llm_api_options"] == "/logs/a.config.json"
    assert pairs["--max_batch_size"] == "8"
    assert "--config" not in pairs
    written = json.loads(launcher_of("tensorrt_llm").config(asked) or "")
    assert written["kv_cache_config"] == {"enable_block_reuse": False, "dtype": "fp8"}
    assert written["dtype"] == "bfloat16"


def test_tensorrt_llm_serves_an_engine_that_was_built_before() -> None:
    asked = spec("tensorrt_llm", args={"engine_dir": "/built"}, python=Path("python3"))
    words = command(asked)
    assert words[:2] == ["trtllm-serve", "/built"]
    assert words[words.index("--backend") + 1] == "tensorrt"
    assert words[words.index("--tokenizer") + 1] == "/mo"
    assert set(json.loads(launcher_of("tensorrt_llm").config(asked) or "")) == {"kv_cache_config"}


class Answers:
    """An endpoint that answers from a table."""

    def __init__(self, asked: LaunchSpec, answers: dict[str, Any]) -> None:
        self.spec, self.served_name, self._answers = asked, "there", answers

    def get_json(self, path: str) -> Any:
        if path not in self._answers:
            raise LaunchError("no_info", f"{path} answered 404")
        return self._answers[path]


def info(asked: LaunchSpec, answers: dict[str, Any]) -> Any:
    launcher: Launcher = launcher_of(asked.kind, asked.args)
    return launcher.info(Answers(asked, answers))  # type: ignore[arg-type]


def test_sglang_says_what_it_made_of_its_arguments() -> None:
    answer = {"version": "0.5.23", "served_model_name": "m", "dtype": "bfloat16", "device": "cuda"}
    answer |= {"max_running_requests": 8, "chunked_prefill_size": 512, "context_length": None}
    answer |= {"max_req_input_len": 250, "disable_radix_cache": True, "api_key": "secret"}
    found = info(spec("sglang"), {"/server_info": answer})
    assert (found.version, found.dtype, found.device) == ("0.5.23", "bfloat16", "cuda")
    common = {name: value for name, value in found.settings.items() if name in SETTINGS}
    assert common == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 250,
        "prefix_caching": False,
    }
    assert "secret" not in str(found)


def test_what_tensorrt_llm_built_at_its_start_is_no_launch_time(tmp_path: Path) -> None:
    asked = spec("tensorrt_llm", log=tmp_path / "a.log")
    asked.log.write_text("x\n[TRT-LLM] [I] Total time of building Unnamed Network 0: 00:01:20\ny\n")
    found = info(asked, {"/version": {"version": "1.2.1"}})
    assert (found.version, found.settings) == ("1.2.1", {"engine_build_s": 80})
    asked.log.write_text("nothing was built\n")
    assert info(asked, {"/version": {"version": "1.2.1"}}).settings == {}


@pytest.mark.parametrize(
    ("launch_s", "settings", "without"),
    [(100.0, {"engine_build_s": 80}, 20.0), (100.0, {}, 100.0), (None, {}, None)],
)
def test_a_launch_time_is_without_what_was_built(
    launch_s: float | None, settings: dict[str, object], without: float | None
) -> None:
    who = EngineInfo("tensorrt_llm", "1.2.1", "m", None, None, settings)
    assert real._without_build(launch_s, who) == without


@pytest.mark.parametrize(
    ("answers", "version"),
    [
        ({"/version": {"version": "0.32.0"}}, "0.32.0"),
        ({"/info": {"version": "3.3.7", "model_id": "x"}}, "3.3.7"),
        ({"/props": {"build_info": "b1-abc"}}, "b1-abc"),
        ({}, ""),
    ],
)
def test_a_running_server_is_asked_who_it_is_and_nothing_is_made_up(
    answers: dict[str, Any], version: str
) -> None:
    found = info(spec("http"), answers)
    assert (found.version, found.model, found.dtype, found.device) == (version, "there", None, None)


def test_a_command_has_its_placeholders_put_in() -> None:
    words = [f"{{{name}}}" for name in PLACEHOLDERS] + ["--x={port}", '{"a": 1}', "{}"]
    made = command(spec("command", args={"command": words}), 81)
    assert made == ["81", "/mo", "m", "bfloat16", "cuda:0", "--x=81", '{"a": 1}', "{}"]
    with pytest.raises(LaunchError, match=r"has \{modelpath\}; there are \{port\}, \{model_path\}"):
        command(spec("command", args={"command": ["{modelpath}"]}))


FIELDS = """
class Serving:
    _NS_PATH = "serving"
    served_model_name: A[Optional[str], "its name"] = None
    tp_size: A[int, Arg(help="h", cli_name="--tensor-parallel-size", aliases=["--tp"])] = 1
    hidden: A[bool, Arg(no_cli=True)] = False
    plain: str = ""
"""
ARGS = 'parser.add_argument("--reasoning-parser", help="--not-a-flag")\n'
PROTOCOL = """
class Base:
    bootstrap_host: str = ""
class StreamOptions:
    names: ClassVar[set] = set()
    include_usage: bool = False
class CompletionRequest(Base):
    prompt: str
    max_completion_tokens: int = Field(None, validation_alias="max_tokens")
class ChatCompletionRequest(Base):
    _private: str = ""
    messages: list
"""


def test_what_a_wheel_says_is_read_from_its_source(tmp_path: Path) -> None:
    wheel, root = tmp_path / "sglang-0.0.1-py3-none-any.whl", "sglang/srt"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{root}/arg_groups/fields/serving.py", FIELDS)
        archive.writestr(f"{root}/server_args.py", ARGS)
        archive.writestr(f"{root}/entrypoints/openai/protocol.py", PROTOCOL)
    script = [sys.executable, str(GOLDEN / "extract.py"), str(wheel)]
    found = json.loads(subprocess.run(script, capture_output=True, check=True).stdout)
    assert found == {
        "project": "sglang",
        "version": "0.0.1",
        "from": wheel.name,
        "flags": [
            *("--reasoning-parser", "--served-model-name"),
            *("--tensor-parallel-size", "--tp", "--tp-size"),
        ],
        "completions": ["bootstrap_host", "max_completion_tokens", "max_tokens", "prompt"],
        "chat": ["bootstrap_host", "messages"],
        "stream_options": ["include_usage"],
    }
