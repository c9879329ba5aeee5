"""Prompts as text, with real tokenizers: what is written is read as exactly the same ids."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headway.engines import boot, texts
from headway.engines.models import ModelFolder, prepare, spelling

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it jumps back again.",
    "def main() -> None:\n    for number in range(10):\n        print(number)\n",
    "Où est la bibliothèque ? Ça dépend. 日本語のテキスト 🙂",
] * 5


def trained(path: Path, begin: bool) -> ModelFolder:
    """A byte-level BPE as most models have one; with `begin` it puts a mark before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if begin:
        marked = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.post_processor = marked
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    return ModelFolder("bpe", path, "r", size, (0, 1), (1,), 4096)


@pytest.fixture(scope="module", params=["bpe", "bpe that begins", "tiny_recall", "synthetic:tiny"])
def folder(request, tmp_path_factory) -> ModelFolder:
    path = tmp_path_factory.mktemp("model")
    if request.param.startswith("bpe"):
        return trained(path, "begins" in request.param)
    return prepare(request.param, path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.sampled_from([1, 2, 3, 17, 300]), seed=st.integers(0, 10**6))
def test_a_text_is_read_as_the_ids_that_were_asked_for(folder, length, seed):
    tokenizer = texts.load(folder)
    ordinary = [id for id in range(folder.vocab_size) if id not in folder.special_ids]
    draw = random.Random(seed)
    written = texts.write(tokenizer, draw.choices(ordinary, k=length), ordinary, draw)
    assert written is not None
    ids, text = written
    assert tokenizer.encode(text) == ids
    assert len(ids) == length
    assert text == text.strip()
    assert set(ids) <= set(ordinary)
    longer = texts.write(tokenizer, draw.choices(ordinary, k=length), ordinary, draw, ids)
    assert longer is not None
    assert longer[0][:length] == ids
    assert tokenizer.encode(longer[1]) == longer[0]


def test_what_a_tokenizer_puts_before_a_text_is_known(tmp_path):
    assert texts.load(trained(tmp_path, begin=True)).begins == (0,)
    assert texts.load(trained(tmp_path, begin=False)).begins == ()


def test_random_ids_alone_would_be_read_as_others(tmp_path):
    folder = trained(tmp_path, begin=False)
    tokenizer = texts.load(folder)
    ids = random.Random(1).choices(range(2, folder.vocab_size), k=300)
    assert tokenizer.encode(tokenizer.decode(ids)) != ids


def test_the_process_writes_what_it_is_asked_for(tmp_path):
    folder = trained(tmp_path, begin=True)
    command = [sys.executable, boot.__file__, "headway.engines.texts"]
    question = {"id": 1, "ids": [70, 80, 90], "fixed": [], "seed": "s"}
    done = subprocess.run(
        [*command, "--model-json", json.dumps(folder.to_json())],
        input=f"{json.dumps(question)}\n" * 2,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    ready, one, two = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True, "begins": [0]}
    assert one == two
    assert texts.load(folder).encode(one["text"]) == one["ids"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20))
def test_a_stream_shows_one_of_the_texts_that_its_tokens_may_show(folder, seed, length):
    """As servers in Rust and transformers stream: any ids, characters in parts among them."""
    tokenizer, draw = texts.load(folder), random.Random(seed)
    ids = draw.choices(range(folder.vocab_size), k=length)
    stream, sent = decoders.DecodeStream([], skip_special_tokens=True), ""
    for id in ids:
        sent += stream.step(tokenizer._tokenizer, id) or ""
    assert sent in spelling.shown(tokenizer, ids)
    held = tokenizer.decode(ids)
    assert held.startswith(sent)
    if not held.endswith(spelling.INCOMPLETE):
        assert sent == held
