"""What checkpoints and requests carry that must not reach a verdict or end an engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from headway.engines import boot
from headway.engines.contract import Submission
from headway.engines.hf import HfNaive
from headway.engines.models import ModelError, ModelFolder, prepare, scoring
from headway.engines.models.folder import content_hash
from headway.engines.models.loading import load
from headway.engines.models.tiny_recall.task import recall_prompt
from headway.engines.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return prepare("tiny_recall", tmp_path_factory.mktemp("home"))


@pytest.fixture
def copy(tiny: ModelFolder, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny.path, folder)
    (folder / "headway.json").unlink(missing_ok=True)
    return folder


def test_generate_heeds_nothing_of_the_checkpoints_own_settings(tiny: ModelFolder) -> None:
    prompt, expected = recall_prompt(3, 64, 12)
    model = load(tiny, "float32", "cpu")
    model.generation_config = GenerationConfig(
        repetition_penalty=3.0, eos_token_id=expected[2], do_sample=True, temperature=2.0
    )
    assert scoring.generate(model, prompt, 12, ()) == list(expected[:12])


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-50, 1.0), (1e-6, 1.0), (1.0, 1e-50)])
def test_extreme_sampling_is_greedy_and_ends_nothing(
    tiny: ModelFolder, temperature: float, top_p: float
) -> None:
    prompt, expected = recall_prompt(5, 48, 6)
    engine = HfNaive(tiny, "float32", "cpu")
    engine.add(
        Submission(
            1, tuple(prompt), 6, ignore_eos=True, temperature=temperature, top_p=top_p, seed=1
        )
    )
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == list(expected[:6])


def test_a_checkpoint_that_lacks_a_weight_is_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    lost = next(name for name in weights if "q_proj" in name)
    del weights[lost]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    folder = prepare(str(copy), copy.parent)
    with pytest.raises(ModelError, match=f"1 missing weights, {lost} the first"):
        load(folder, "float32", "cpu")


def test_a_change_of_any_layer_is_another_revision(copy: Path) -> None:
    before = content_hash(copy)
    weights = load_file(copy / "model.safetensors")
    names = sorted(weights)
    for name in (names[0], names[len(names) // 2], names[-1]):
        changed = {**weights, name: weights[name] + torch.ones_like(weights[name])}
        save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
        assert content_hash(copy) != before


def test_lengths_of_a_models_training_do_not_cut_prompts(copy: Path) -> None:
    file = copy / "tokenizer.json"
    stored = json.loads(file.read_text())
    text = load_tokenizer(prepare(str(copy), copy.parent)).decode([9, 10, 11, 12, 13, 14])
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(stored))
    tokenizer = load_tokenizer(prepare(str(copy), copy.parent))
    assert tokenizer.encode(text) == [9, 10, 11, 12, 13, 14]


def test_a_folder_with_code_of_its_own_is_refused_without_a_question(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    config["model_type"] = "a_type_of_its_own"
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('this must never run')\n")
    with pytest.raises(ModelError):
        load(prepare(str(copy), copy.parent), "float32", "cpu")


WORKERS = """
import multiprocessing, sys
def work(queue):
    import headway.engines.contract
    queue.put("seen")
def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    sys.stdout.write(queue.get(timeout=60))
    process.join()
"""
ENTRY = """
import workers
if __name__ == "__main__":
    workers.main()
"""


def test_an_engine_that_spawns_workers_finds_headway_in_them(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "entry.py").write_text(ENTRY)
    done = subprocess.run(
        [sys.executable, boot.__file__, "entry"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "seen", done.stderr
