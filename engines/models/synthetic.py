"""Models of real shapes without weights on disk: for speed, where no weights can be fetched.

Shapes and special tokens are those of the published configurations; the weights are made from a
seed when the model is loaded (`loading`). What they write means nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.models.plain_tokenizer import write_plain_tokenizer
from headway.engines.models.store import build_once

PREFIX = "synthetic:"
NUM_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's shape, and the ids that its tokenizer keeps for control."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    norm_epsilon: float
    tied: bool
    bos_id: int
    eos_ids: tuple[int, ...]
    special_ids: range


SHAPES = {
    "qwen2.5_7b": Shape(
        "Qwen2ForCausalLM", 28, 3584, 28, 4, 18944, 152064, 32768, 1e6, 1e-6, False,
        151643, (151645, 151643), range(151643, 152064),
    ),
    "qwen2.5_1.5b": Shape(
        "Qwen2ForCausalLM", 28, 1536, 12, 2, 8960, 151936, 32768, 1e6, 1e-6, True,
        151643, (151645, 151643), range(151643, 151936),
    ),
    "llama3_8b": Shape(
        "LlamaForCausalLM", 32, 4096, 32, 8, 14336, 128256, 8192, 5e5, 1e-5, False,
        128000, (128001, 128009), range(128000, 128256),
    ),
    "tiny": Shape(
        "LlamaForCausalLM", 2, 64, 4, 2, 128, 512, 2048, 1e4, 1e-5, False,
        0, (1,), range(0, 3),
    ),
}  # fmt: skip
NAMES = tuple(f"{PREFIX}{shape}" for shape in SHAPES)


def prepare(name: str, home: Path, revision: str | None = None) -> ModelFolder:
    """Return the folder of a shape and a seed; the revision is `seed0` or as asked, `seedN`."""
    shape = SHAPES.get(name.removeprefix(PREFIX))
    if shape is None:
        raise ModelError(f"there is no model {name!r}: synthetic ones are {', '.join(NAMES)}")
    revision = f"seed{parse_seed(revision or '0')}"

    def build(path: Path) -> ModelFolder:
        config = json.dumps(configuration(shape), indent=1)
        (path / "config.json").write_text(config + "\n", encoding="utf-8")
        special = shape.special_ids
        write_plain_tokenizer(
            path, shape.vocab_size, shape.eos_ids[0], unknown_id=special.stop % shape.vocab_size,
            special_ids=special,
        )  # fmt: skip
        return ModelFolder(
            name=name,
            path=path,
            revision=revision,
            vocab_size=shape.vocab_size,
            special_ids=tuple(special),
            eos_ids=shape.eos_ids,
            context_length=shape.context_length,
            synthetic=True,
        )

    return build_once(home, f"{name.replace(':', '_')}_{revision}", NUM_BYTES, build)


def parse_seed(revision: str) -> int:
    """Read `7` or `seed7`."""
    digits = revision.removeprefix("seed")
    if not (digits.isascii() and digits.isdigit()):
        raise ModelError(f"the revision of a synthetic model is a seed like 7, not {revision!r}")
    return int(digits)


def configuration(shape: Shape) -> dict[str, object]:
    """Return what `config.json` says of a shape."""
    return {
        "architectures": [shape.architecture],
        "model_type": "qwen2" if shape.architecture.startswith("Qwen2") else "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.mlp_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "bos_token_id": shape.bos_id,
        "eos_token_id": list(shape.eos_ids),
        # Without a version, transformers suspects large vocabularies of an old tokenizer's fault.
        "transformers_version": "5.0.0",
    }
