"""GGUF files: the same weights under llama.cpp's names, the same ids, made once, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.engines.models import ModelError, ModelFolder, gguf_vocabulary, prepare, to_gguf
from headway.engines.models.folder import describe

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BYTE_LEVEL = {
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "decoder": {"type": "ByteLevel"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def tiny(home) -> ModelFolder:
    return prepare("tiny_recall", home)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's settings, and its tensors by name."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor: Any) -> np.ndarray[Any, Any]:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def neighbours(weight: torch.Tensor, heads: int) -> np.ndarray[Any, Any]:
    """The oracle, row by row: row i of a head's first half comes at 2i, of its second at 2i + 1."""
    rows, size = weight.numpy(), weight.shape[0] // heads
    turned = np.empty_like(rows)
    for head in range(heads):
        for row in range(size):
            place = 2 * row if row < size // 2 else 2 * (row - size // 2) + 1
            turned[head * size + place] = rows[head * size + row]
    return turned


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_those_of_the_folder(tiny, home, dtype):
    _, tensors = read(to_gguf.convert_once(tiny, dtype, home))
    held = load_file(tiny.path / "model.safetensors")
    precision = getattr(torch, dtype)

    def same(name: str, weight: np.ndarray[Any, Any], kind: str) -> bool:
        tensor = tensors.pop(name)
        assert tensor.tensor_type.name == kind
        return np.array_equal(values(tensor), weight)

    def rounded(key: str) -> torch.Tensor:
        return held[key].to(precision).float()

    assert same("token_embd.weight", rounded("model.embed_tokens.weight").numpy(), TYPES[dtype])
    assert same("output_norm.weight", held["model.norm.weight"].float().numpy(), "F32")
    for layer in range(2):
        block, ours = f"blk.{layer}", f"model.layers.{layer}"
        for name, key, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
            weight = neighbours(rounded(f"{ours}.self_attn.{key}.weight"), heads)
            assert same(f"{block}.{name}.weight", weight, TYPES[dtype])
        for name, key in (
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            assert same(
                f"{block}.{name}.weight", rounded(f"{ours}.{key}.weight").numpy(), TYPES[dtype]
            )
        for name, key in (
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            assert same(
                f"{block}.{name}.weight", held[f"{ours}.{key}.weight"].float().numpy(), "F32"
            )
    # Tied: the embedding is the head, and nothing else is left.
    assert tensors == {}


def test_settings_are_those_of_the_configuration(tiny, home):
    fields, _ = read(to_gguf.convert_once(tiny, "float32", home))
    assert fields["general.architecture"] == "llama"
    llama = {key.removeprefix("llama."): v for key, v in fields.items() if key.startswith("llama.")}
    assert llama.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert llama == {
        "context_length": 512,
        "embedding_length": 128,
        "block_count": 2,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
        "vocab_size": 128,
    }


def test_words_are_found_whole_and_ends_are_ends(tiny, home):
    fields, _ = read(to_gguf.convert_once(tiny, "float32", home))
    assert fields["tokenizer.ggml.tokens"] == [f"<{id}>" for id in range(128)]
    types = fields["tokenizer.ggml.token_type"]
    assert types[1] == types[2] == gguf_vocabulary.CONTROL
    assert set(types[3:]) == {gguf_vocabulary.USER_DEFINED}
    ids = {key: fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "padding")}
    assert ids == {"bos": 0, "eos": 1, "padding": 2}
    assert fields["tokenizer.ggml.add_bos_token"] is False


def test_it_is_made_once_for_each_revision_and_dtype(tiny, home, monkeypatch):
    first = to_gguf.convert_once(tiny, "float32", home)
    assert to_gguf.convert_once(tiny, "bfloat16", home) != first
    other = to_gguf.convert_once(replace(tiny, revision="sha256:other"), "float32", home)
    assert other != first
    assert other.read_bytes() == first.read_bytes()
    monkeypatch.setattr(to_gguf, "_write", None)
    assert to_gguf.convert_once(tiny, "float32", home) == first
    assert home in first.parents


def test_the_command_prints_the_file_last(tiny, home, capsys, monkeypatch):
    words = ["to_gguf", "--model-json", json.dumps(tiny.to_json()), "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", [*words, "--home", str(home)])
    to_gguf.main()
    assert Path(capsys.readouterr().out.splitlines()[-1]).is_file()
    monkeypatch.setattr("sys.argv", [*words[:-1], "int4", "--home", str(home)])
    with pytest.raises(
        SystemExit, match="dtype must be one of float32, bfloat16, float16, not 'int4'"
    ):
        to_gguf.main()


def small(folder: Path, **changes: Any) -> ModelFolder:
    """Write a Qwen2 of one layer, with biases, a head of its own, and byte-level BPE."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "eos_token_id": [6, 0],
        "tie_word_embeddings": False,
    } | changes
    sizes = {
        "model.embed_tokens.weight": (8, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (8, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.q_proj.bias": (8,),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.k_proj.bias": (4,),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.bias": (4,),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 12),
    }
    torch.manual_seed(0)
    names = sorted(sizes)
    for number, part in enumerate((names[:7], names[7:])):
        weights = {name: torch.randn(sizes[name], dtype=torch.bfloat16) for name in part}
        save_file(weights, folder / f"model-{number}.safetensors")
    # "â" alone is the first of three bytes of a sign; "Ġ" is a space.
    vocab = {"a": 0, "Ġ": 1, "Ġa": 2, "â": 3, "âĢĻ": 4, "ab": 5}
    tokenizer = {
        "added_tokens": [{"id": 6, "content": "<end>", "special": True}],
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ġ", "a"], ["a", "b"]]},
        **BYTE_LEVEL,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return describe(folder, "org/small")


@pytest.fixture
def no_tokenizer(monkeypatch):
    """The tokenizer is not what these folders are for: only whether it puts something in front."""
    monkeypatch.setattr(gguf_vocabulary, "FileTokenizer", lambda model: Begins())


class Begins:
    begins = ()


def test_other_families_keep_their_rows_and_an_own_head(tmp_path, no_tokenizer):
    model = small(tmp_path)
    file = to_gguf.convert_once(model, "float32", tmp_path / "home")
    fields, tensors = read(file)
    held = load_file(tmp_path / "model-0.safetensors") | load_file(tmp_path / "model-1.safetensors")
    assert fields["general.architecture"] == "qwen2"
    assert fields["qwen2.rope.freq_base"] == 1e6
    assert len(tensors) == len(held)
    for name, key in (
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
    ):
        assert np.array_equal(values(tensors[name]), held[key].float().numpy())
    assert "small" in file.parent.name
    assert (tmp_path / "home" / "models") == file.parents[1]


def test_pieces_of_characters_are_unused_so_that_no_id_is_lost(tmp_path, no_tokenizer):
    fields, _ = read(to_gguf.convert_once(small(tmp_path), "float32", tmp_path / "home"))
    assert fields["tokenizer.ggml.tokens"][3:] == ["â", "âĢĻ", "ab", "<end>", "[PAD7]"]
    normal, unused, control = (
        gguf_vocabulary.NORMAL,
        gguf_vocabulary.UNUSED,
        gguf_vocabulary.CONTROL,
    )
    types = [normal, normal, normal, unused, normal, normal, control, unused]
    assert fields["tokenizer.ggml.token_type"] == types
    assert fields["tokenizer.ggml.merges"] == ["Ġ a", "a b"]
    assert fields["tokenizer.ggml.eos_token_id"] == 6
    assert fields["tokenizer.ggml.eot_token_id"] == 0
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of the type yarn"),
        ({"use_sliding_window": True}, "a sliding window"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, changes, said):
    model = small(tmp_path, **changes)
    with pytest.raises(ModelError, match=f"with {said}.*own converter"):
        to_gguf.convert_once(model, "float32", tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_tokenizer_that_it_does_not_have_is_refused(tmp_path, no_tokenizer):
    model = small(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["byte_fallback"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="no byte-level BPE"):
        to_gguf.convert_once(model, "float32", tmp_path / "home")
    assert not list((tmp_path / "home" / "models").iterdir())


def test_models_without_weights_are_refused(home):
    with pytest.raises(ModelError, match="has no weights on disk"):
        to_gguf.convert_once(prepare("synthetic:tiny", home), "float32", home)


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "use_regex": True},
                ],
            },
            "smollm",
        ),
        ({"type": "Split", "pattern": {"Regex": "x"}}, "default"),
    ],
)
def test_how_texts_are_split_has_a_name(pre, name, capsys):
    assert gguf_vocabulary._split(pre) == name
    assert ("ids are right, texts may not be" in capsys.readouterr().err) == (name == "default")


def test_llama_3_stretches_its_long_waves_only():
    """transformers' own frequencies are the oracle."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {"rope_parameters": rope}
    shape = to_gguf.Shape("llama", 1, 32, 8, 128, False)
    factors = to_gguf.rope_factors(shape, config)
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=rope), "cpu"
    )
    np.testing.assert_allclose(plain / np.array(factors), theirs.numpy(), rtol=1e-5)
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
