"""Models with torch: SmolLM2 says Paris, invented weights behave, tiny_recall reads its context."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from headway.engines import models
from headway.engines.models import ModelError, ModelFolder, default_home, prepare, scoring
from headway.engines.models.loading import load
from headway.engines.models.tiny_recall import task
from headway.engines.models.tokenizer import load_tokenizer

BOOT = Path(models.__file__).resolve().parents[1] / "boot.py"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def tiny_recall(home):
    folder = prepare("tiny_recall", home)
    return folder, load(folder, "float32", "cpu")


@pytest.fixture(scope="module")
def smollm2() -> ModelFolder:
    """Converted once for all sessions; a machine that cannot fetch it skips."""
    command = [sys.executable, str(BOOT), "headway.engines.models", "smollm2_135m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if "cannot fetch" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return ModelFolder.from_json(json.loads(done.stdout.splitlines()[-1]))


def accuracy(model, prompts: list[tuple[list[int], list[int]]]) -> float:
    """The part of greedy tokens that are right, all prompts of one length in one batch."""
    inputs = torch.tensor([prompt for prompt, _ in prompts])
    expected = torch.tensor([output for _, output in prompts])
    made = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=expected.shape[1],
        eos_token_id=None,
        pad_token_id=task.PAD,
    )[:, inputs.shape[1] :]
    return (made == expected).float().mean().item()


# SmolLM2


def test_smollm2_knows_the_capital_of_france(smollm2):
    tokenizer = load_tokenizer(smollm2)
    model = load(smollm2, "float32", "cpu")
    output = scoring.generate(model, tokenizer.chat(MESSAGES), 32, tokenizer.eos_ids)
    assert tokenizer.decode(output) == "The capital of France is Paris."
    assert output[-1] in smollm2.eos_ids
    assert len(tokenizer.encode(tokenizer.decode(output))) == len(output) - 1


def test_smollm2_is_prepared_once(smollm2):
    again = prepare("smollm2_135m", default_home())
    assert again == smollm2
    names = {path.name for path in smollm2.path.iterdir()}
    assert not [name for name in names if name.endswith((".gguf", ".whl"))]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_our_tokenizer_is_transformers_tokenizer(smollm2):
    ours, theirs = load_tokenizer(smollm2), AutoTokenizer.from_pretrained(smollm2.path)
    chats = [MESSAGES, [{"role": "system", "content": "Be brief."}, *MESSAGES]]
    for messages in chats:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.chat(messages) == expected
    for text in ("", "Hello, wörld 你好 🚄\n\n  x", "<|im_start|>user"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# Tokenizers of folders


def test_loading_a_tokenizer_imports_no_torch(home):
    folder = prepare("synthetic:tiny", home)
    code = (
        "import json, runpy, sys\n"
        f"runpy.run_path({str(BOOT)!r})\n"
        "from headway.engines.models import ModelFolder\n"
        "from headway.engines.models.tokenizer import load_tokenizer\n"
        f"load_tokenizer(ModelFolder.from_json(json.loads({json.dumps(folder.to_json())!r})))\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["tiny_recall", "synthetic:tiny", "synthetic:qwen2.5_7b"])
def test_plain_text_gives_back_its_ids(name, home):
    folder = prepare(name, home)
    tokenizer = load_tokenizer(folder)
    rng = random.Random(1)
    usable = sorted(set(range(folder.vocab_size)) - set(folder.special_ids))
    ids = rng.choices(usable, k=50)
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.decode([usable[0], folder.eos_ids[0]]) == f"<{usable[0]}>"
    assert tokenizer.eos_ids == folder.eos_ids
    question = tokenizer.chat(MESSAGES)
    assert len(question) == len(MESSAGES[0]["content"])
    assert set(question) <= set(usable)


@pytest.mark.parametrize("name", ["tiny_recall", "synthetic:tiny", "synthetic:llama3_8b"])
def test_other_engines_read_the_plain_tokenizer_alike(name, home):
    folder = prepare(name, home)
    theirs = AutoTokenizer.from_pretrained(folder.path)
    assert theirs.encode("<17><40>?") == load_tokenizer(folder).encode("<17><40>?")
    assert theirs.decode([17, 40]) == "<17><40>"


@settings(max_examples=50)
@given(st.lists(st.integers(task.THEN, task.VOCAB_SIZE - 1), max_size=40))
def test_plain_text_gives_back_any_ids(ids):
    tokenizer = load_tokenizer(prepare("tiny_recall", Path("/nonexistent")))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def template_folder(path: Path, template: str) -> ModelFolder:
    """The plain tokenizer with another chat template."""
    folder = prepare("synthetic:tiny", path)
    config = json.loads((folder.path / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder.path / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_chat_template_sees_tools_and_special_tokens(tmp_path):
    template = (
        "{{ eos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}<9>{% endif %}"
    )
    tokenizer = load_tokenizer(template_folder(tmp_path, template))
    assert tokenizer.chat(MESSAGES) == [1, 9]
    tool = {"id": "<7>"}
    assert tokenizer.chat(MESSAGES, [tool]) == [1, *tokenizer.encode(json.dumps(tool)), 9]
    assert 7 in tokenizer.chat(MESSAGES, [tool])


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages.__class__.__mro__ }}"],
)
def test_a_chat_template_that_refuses_or_pries_is_one_sentence(template, tmp_path):
    tokenizer = load_tokenizer(template_folder(tmp_path, template))
    with pytest.raises(ModelError, match="refuses the messages"):
        tokenizer.chat(MESSAGES)


# Loading


@pytest.mark.parametrize(
    ("dtype", "device", "attention", "complaint"),
    [
        ("int8", "cpu", "sdpa", "dtype must be one of .*'int8'"),
        ("float32", "warp", "sdpa", "device must be like .*'warp'"),
        ("float32", "cuda:99", "sdpa", "GPUs"),
        ("float32", "cpu", "quick", "quick"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(dtype, device, attention, complaint, home):
    with pytest.raises(ModelError, match=complaint) as caught:
        load(prepare("synthetic:tiny", home), dtype, device, attention)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_one_sentence(tmp_path, tiny_recall):
    folder, _ = tiny_recall
    (tmp_path / "config.json").write_text((folder.path / "config.json").read_text())
    with pytest.raises(ModelError, match=str(tmp_path)) as caught:
        load(prepare(str(tmp_path), tmp_path), "float32", "cpu")
    assert "\n" not in str(caught.value)


def test_float32_means_float32(tiny_recall):
    _, model = tiny_recall
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert torch.get_float32_matmul_precision() == "highest"
    assert not model.training


def test_invented_weights_are_a_function_of_the_seed(home):
    def weights(seed: str, dtype: str = "float32") -> list[torch.Tensor]:
        model = load(prepare("synthetic:tiny", home, seed), dtype, "cpu")
        return [weight.detach() for weight in model.parameters()]

    first, again, other = weights("1"), weights("1"), weights("2")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.dim() > 1)
    for rounded, exact in zip(weights("1", "bfloat16"), first, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_invented_weights_make_logits_that_depend_on_the_context(home):
    folder = prepare("synthetic:tiny", home)
    model = load(folder, "float32", "cpu")
    ids = torch.tensor([random.Random(0).choices(range(3, folder.vocab_size), k=64)])
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % folder.vocab_size
    with torch.inference_mode():
        logits, others = model(ids).logits[0], model(changed).logits[0]
    assert torch.isfinite(logits).all()
    assert 1 < logits.std().item() < 20
    assert len(set(logits.argmax(-1).tolist())) > 32
    assert (logits[-1] - others[-1]).abs().max().item() > 1e-3


# tiny_recall


@pytest.mark.parametrize("num_tokens", [16, 32, 64, 100, 128, 180, 256])
def test_tiny_recall_is_right_on_prompts_it_never_saw(tiny_recall, num_tokens):
    _, model = tiny_recall
    prompts = [task.recall_prompt(1_000_000 + seed, num_tokens) for seed in range(16)]
    assert accuracy(model, prompts) >= 0.99


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiny_recall_is_right_in_half_precision(tiny_recall, dtype):
    model = load(tiny_recall[0], dtype, "cpu")
    prompts = [task.recall_prompt(2_000_000 + seed, 128) for seed in range(16)]
    assert accuracy(model, prompts) >= 0.99


def test_tiny_recall_is_small_and_complete(tiny_recall):
    folder, _ = tiny_recall
    sizes = [path.stat().st_size for path in folder.path.iterdir() if path.is_file()]
    assert sum(sizes) < 4_000_000
    config = json.loads((folder.path / "config.json").read_text())
    assert (folder.vocab_size, folder.context_length) == (task.VOCAB_SIZE, task.CONTEXT_LENGTH)
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert folder.special_ids == (task.BOS, task.EOS, task.PAD, task.QUERY)
    assert folder.eos_ids == (task.EOS,)


def test_two_values_swapped_in_the_prompt_change_the_answer(tiny_recall):
    _, model = tiny_recall
    num_changed = 0
    for seed in range(8):
        prompt, before = task.recall_prompt(3_000_000 + seed, 160)
        records = random.Random(seed).sample(task.find_records(prompt), 2)
        pairs = list(itertools.pairwise(prompt))
        one, two = (pairs.index(record) + 1 for record in records)
        prompt[one], prompt[two] = prompt[two], prompt[one]
        after = task.expected_output(prompt, 32)
        assert scoring.generate(model, prompt, 32, ()) == after
        num_changed += after != before
    assert num_changed >= 2


def prefill(model, prompt: list[int]):
    """The cache of a prompt's tokens, all but the last."""
    with torch.no_grad():
        return model(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values


def decode(
    model, cache, prompt: list[int], num_tokens: int, shift: int = 0, lose: int | None = None
) -> list[int]:
    """Greedy tokens from a cache, as an engine makes them, with planted faults.

    Positions are wrong by `shift`; what is written at step `lose` is lost at once.
    """
    token, output = prompt[-1], []
    for step in range(num_tokens):
        place = torch.tensor([[len(prompt) - 1 + step + shift]])
        with torch.no_grad():
            logits = model(
                torch.tensor([[token]]), past_key_values=cache, position_ids=place, use_cache=True
            ).logits
        if step == lose:
            for layer in cache.layers:
                layer.keys[:, :, -1] = 0
                layer.values[:, :, -1] = 0
        token = int(logits[0, -1].argmax())
        output.append(token)
    return output


def test_the_cache_alone_gives_the_right_answer(tiny_recall):
    _, model = tiny_recall
    prompt, expected = task.recall_prompt(4_000_000, 160)
    assert decode(model, prefill(model, prompt), prompt, 32) == expected


@pytest.mark.parametrize("start", range(16, 144, 16))
def test_a_zeroed_block_of_the_prompt_changes_the_answer(tiny_recall, start):
    """Sixteen tokens, as when an engine loses a block; the answer needs each record once."""
    _, model = tiny_recall
    prompt, _ = task.recall_prompt(5_000_000 + start, 160)
    expected = task.expected_output(prompt, 2 * len(task.find_records(prompt)))
    cache = prefill(model, prompt)
    for layer in cache.layers:
        layer.keys[:, :, start : start + 16] = 0
        layer.values[:, :, start : start + 16] = 0
    assert decode(model, cache, prompt, len(expected)) != expected


@pytest.mark.parametrize("step", [1, 9, 17])
def test_one_lost_token_of_the_answer_changes_what_follows(tiny_recall, step):
    _, model = tiny_recall
    prompt, expected = task.recall_prompt(5_500_000 + step, 160)
    output = decode(model, prefill(model, prompt), prompt, 32, lose=step)
    assert output[: step + 1] == expected[: step + 1]
    assert output[step + 1] != expected[step + 1]


def test_another_requests_cache_gives_another_answer(tiny_recall):
    _, model = tiny_recall
    prompt, expected = task.recall_prompt(6_000_000, 160)
    other, _ = task.recall_prompt(6_000_001, 160)
    assert decode(model, prefill(model, other), prompt, 32) != expected


def test_positions_off_by_one_change_the_answer(tiny_recall):
    _, model = tiny_recall
    prompt, expected = task.recall_prompt(7_000_000, 160)
    assert decode(model, prefill(model, prompt), prompt, 32, shift=1) != expected


# The task itself


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(task.MIN_PROMPT_TOKENS, 480))
def test_a_prompt_is_a_function_of_its_seed(seed, num_tokens):
    prompt, output = task.recall_prompt(seed, num_tokens)
    assert (prompt, output) == task.recall_prompt(random.Random(seed), num_tokens)
    assert len(prompt) == num_tokens
    assert len(output) == 32
    records = task.find_records(prompt)
    assert len({first for first, _ in records}) == len(records)
    assert {first for first, _ in records} == {second for _, second in records}
    assert set(output) <= {task.THEN, *(second for _, second in records)}


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(task.MIN_PROMPT_TOKENS, 300))
def test_twice_as_many_tokens_as_records_need_each_record_once(seed, num_tokens):
    prompt, _ = task.recall_prompt(seed, num_tokens)
    records = task.find_records(prompt)
    output = task.expected_output(prompt, 2 * len(records))
    assert sorted(output[::2]) == sorted(second for _, second in records)
    assert set(output[1::2]) == {task.THEN}


@pytest.mark.parametrize(("num_tokens", "num_output"), [(11, 1), (512, 1), (490, 32)])
def test_a_prompt_that_cannot_be_is_refused(num_tokens, num_output):
    with pytest.raises(ValueError, match=f"not {num_tokens} with {num_output}"):
        task.recall_prompt(0, num_tokens, num_output)
