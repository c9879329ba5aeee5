"""What kinds of engine need in a suite, and must not have, each said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import outlook, suite

DIGEST = f"lmsysorg/sglang@sha256:{'0123456789abcdef' * 4}"
WORKLOAD = '[workload.w]\nsend = "text"\nconcurrency = [2]\n'
HTTP = 'kind = "http"\nbase_url = "http://127.0.0.1:8000"\n'
COMMAND = 'kind = "command"\nargs = { command = ["serve", "{port}"] }\n'


def load(tmp_path: Path, engine: str, rest: str = WORKLOAD) -> suite.Suite:
    path = tmp_path / "some.toml"
    path.write_text(f"[engine.a]\n{engine}\n{rest}", encoding="utf-8")
    return suite.load(path)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ('kind = "http"', "base_url is missing: kind http is a running server's"),
        (
            'kind = "fake"\nbase_url = "http://h:1"',
            "base_url is of a server that runs already, kind http; a fake is started here",
        ),
        *(
            (
                f'kind = "http"\nbase_url = {url!r}',
                f"base_url is {url!r}; it must look like http://host:port or https://host/path",
            )
            for url in ("127.0.0.1:8000", "ftp://h", "http://h:99999", "http://u@h", "http://h?a=b")
        ),
        *(
            (f"{HTTP}{line}", f"{line.split()[0]} is of engines that we start; kind is http")
            for line in ("port = 1", "gpus = [0]", 'python = "p"', "env = { A = 'b' }")
        ),
        (f'{HTTP}image = "{DIGEST}"', "image is of engines that we start; kind is http"),
        (
            f"{HTTP}args = {{ max_num_seqs = 3 }}",
            "args.max_num_seqs is not known; allowed: dialect, served_model",
        ),
        (
            f'{HTTP}args = {{ dialect = "vlm" }}',
            "args.dialect is 'vlm'; allowed: openai, vllm, sglang, tensorrt_llm, llama_cpp, tgi",
        ),
        (f"{HTTP}args = {{ served_model = 3 }}", "args.served_model is 3; it must be a string"),
        ('kind = "command"', 'args.command is missing: ["my-server", "--port", "{port}"]'),
        (
            'kind = "command"\nargs = { command = [1] }',
            "args.command is [1]; it must be a list of strings",
        ),
        (
            'kind = "command"\nargs = { command = ["x", "{prot}"] }',
            "args.command has {prot}; there are {port}, {model_path}, {served_name}, {dtype}, "
            "{device}",
        ),
        (
            'kind = "command"\nargs = { command = ["x"], health = "health" }',
            "args.health is 'health'; it must be a path such as /health",
        ),
        (
            f'{COMMAND}python = "p"',
            "python is nothing that kind command runs in; args.command says what is run",
        ),
        (
            'kind = "sglang"',
            "kind needs python or image beside it: Headway has no environment for sglang",
        ),
        (
            'kind = "tensorrt_llm"',
            "kind needs python or image beside it: Headway has no environment for tensorrt_llm",
        ),
        ('kind = "image"', "image is missing: repo/name@sha256:DIGEST"),
        (
            'kind = "sglang"\nimage = "lmsysorg/sglang:v0.5.23"',
            "image is 'lmsysorg/sglang:v0.5.23'; it must be pinned: repo/name@sha256:DIGEST",
        ),
        (
            f'kind = "hf_naive"\nimage = "{DIGEST}"',
            "image is for kinds vllm_serve, sglang, tensorrt_llm, image; hf_naive runs in no image",
        ),
        (
            f'kind = "sglang"\nimage = "{DIGEST}"\npython = "venv/bin/python"',
            "python is 'venv/bin/python'; in an image it must be a name or an absolute path",
        ),
        (
            f'kind = "image"\nimage = "{DIGEST}"\nsource = "git:x"',
            "source builds nothing for an image",
        ),
        (
            f'kind = "tensorrt_llm"\nimage = "{DIGEST}"\nargs = {{ engine_dir = "/e" }}',
            "args.engine_dir is not in the image; leave image out",
        ),
    ],
)
def test_what_a_kind_needs_and_must_not_have(tmp_path: Path, engine: str, message: str) -> None:
    with pytest.raises(suite.SuiteError) as caught:
        load(tmp_path, engine)
    assert str(caught.value) == f"{tmp_path / 'some.toml'}: engine.a.{message}"


@pytest.mark.parametrize(
    "engine",
    [
        HTTP,
        f'{HTTP}api_key_env = "KEY"\nargs = {{ dialect = "vllm", served_model = "x" }}',
        COMMAND,
        f'{COMMAND}gpus = [0]\nenv = {{ A = "b" }}\nport = 8000',
        'kind = "sglang"\npython = "/venv/bin/python"',
        f'kind = "sglang"\nimage = "{DIGEST}"\ngpus = [0]',
        f'kind = "sglang"\nimage = "{DIGEST}"\npython = "/opt/venv/bin/python"',
        f'kind = "image"\nimage = "{DIGEST}"\nargs = {{ command = ["--port", "{{port}}"] }}',
        f'kind = "tensorrt_llm"\nimage = "{DIGEST}"',
    ],
)
def test_what_is_right_is_taken(tmp_path: Path, engine: str) -> None:
    outlook.check(load(tmp_path, engine))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/api/v1", "https://h/api"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://h/v10", "http://h/v10"),
    ],
)
def test_an_address_ends_before_what_we_ask_for(tmp_path: Path, given: str, kept: str) -> None:
    loaded = load(tmp_path, f'kind = "http"\nbase_url = "{given}"')
    assert loaded.instance("a").base_url == kept


def test_ids_are_not_sent_to_who_takes_text_only(tmp_path: Path) -> None:
    message = r"workload\.w\.send is 'ids', which a \(http\) does not take; write send = \"text\""
    with pytest.raises(suite.SuiteError, match=message):
        load(tmp_path, HTTP, "[workload.w]\nconcurrency = [2]\n")
    load(tmp_path, f'{HTTP}args = {{ dialect = "vllm" }}', "[workload.w]\nconcurrency = [2]\n")


@pytest.mark.parametrize("metric", ["launch_time", "peak_memory"])
def test_what_is_not_ours_to_measure_cannot_gate(tmp_path: Path, metric: str) -> None:
    limit = f'[[limit]]\nmetric = "{metric}"\nengine = "a"\nmax = 1.0\n'
    outlook.check(load(tmp_path, COMMAND, WORKLOAD + limit))
    with pytest.raises(suite.SuiteError, match="judges no cell; a ran before we came"):
        outlook.check(load(tmp_path, HTTP, WORKLOAD + limit))
