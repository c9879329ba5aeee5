"""A model folder as a GGUF file, which is all that llama.cpp reads: the same weights, and ids.

    python boot.py headway.engines.models.to_gguf --model-json '{…}' --dtype float32 [--home DIR]

It is made once per revision and dtype, below Headway's home. The last line on stdout is its path.
Dense models of the Llama and Qwen families are written; for others give llama.cpp a file of its
own converter's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.models.store import build_once, default_home, say

FILE = "model.gguf"
# Hugging Face's class → the name that llama.cpp gives the architecture.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a configuration says where weights go and how they are turned."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool


def convert_once(model: ModelFolder, dtype: str, home: Path) -> Path:
    """Return the GGUF file of a model in a dtype, made if need be; raises ModelError."""
    if model.synthetic:
        raise ModelError(f"{model.name} has no weights on disk to make a GGUF file of")
    if dtype not in BYTES_PER_WEIGHT:
        raise ModelError(f"dtype must be one of {', '.join(BYTES_PER_WEIGHT)}, not {dtype!r}")
    # Checked before anything is made.
    config, tokenizer = read_config(model.path), _read_json(model.path / "tokenizer.json")
    shape = read_shape(config)
    sizes = [file.stat().st_size for file in model.path.glob("*.safetensors")]
    if not sizes:
        raise ModelError(f"{model.path} holds no .safetensors file to make a GGUF file of")

    def build(folder: Path) -> ModelFolder:
        from headway.engines.models import gguf_vocabulary

        say(f"writing {model.name} as GGUF in {dtype} for llama.cpp, once")
        vocabulary = gguf_vocabulary.read(model, tokenizer, config)
        _write(folder / FILE, model, dtype, shape, config, vocabulary)
        return replace(model, path=folder)

    words = (model.name.split("/")[-1], model.revision.rpartition(":")[2], dtype, "gguf")
    name = "-".join(re.sub(r"[^\w.]", "_", word) for word in words)
    return build_once(home, name, 2 * sum(sizes), build).path / FILE


def read_config(path: Path) -> dict[str, Any]:
    """Return a folder's configuration of its language model, with RoPE's settings in one place."""
    config = _read_json(path / "config.json")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return config | {"rope_parameters": rope}


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Return a configuration's shape; ModelError where llama.cpp would compute something else."""
    architecture = (config.get("architectures") or ["an unnamed architecture"])[0]
    rope = config["rope_parameters"]["rope_type"]
    unknown = None
    if architecture not in ARCHITECTURES:
        unknown = f"{architecture} (known: {', '.join(ARCHITECTURES)})"
    elif rope not in ("default", "linear", "llama3"):
        unknown = f"RoPE of the type {rope}"
    elif config.get("use_sliding_window"):
        unknown = "a sliding window"
    if unknown:
        raise ModelError(
            f"no GGUF file can be written of a model with {unknown}: "
            "make one with llama.cpp's own converter, and name it by the argument gguf"
        )
    heads = int(config["num_attention_heads"])
    return Shape(
        architecture=ARCHITECTURES[architecture],
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _write(
    file: Path,
    model: ModelFolder,
    dtype: str,
    shape: Shape,
    config: Mapping[str, Any],
    vocabulary: Callable[[Any], None],
) -> None:
    import gguf

    writer = gguf.GGUFWriter(None, shape.architecture)
    types = gguf.LlamaFileType
    file_type = {
        "float32": types.ALL_F32,
        "bfloat16": types.MOSTLY_BF16,
        "float16": types.MOSTLY_F16,
    }
    writer.add_name(model.name)
    writer.add_file_type(file_type[dtype])
    _add_settings(writer, shape, config)
    vocabulary(writer)
    weights = Weights(model.path, shape, config, dtype)
    for name, sizes, num_bytes, kind in weights.infos():
        writer.add_tensor_info(name, sizes, weights.array_type(kind), num_bytes, kind)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in weights.arrays():  # one in memory at a time
        writer.write_tensor_data(array)
    writer.close()


def _add_settings(writer: Any, shape: Shape, config: Mapping[str, Any]) -> None:
    import gguf

    rope = config["rope_parameters"]
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


class Weights:
    """A folder's weights under llama.cpp's names, in the order in which they are written."""

    def __init__(self, path: Path, shape: Shape, config: Mapping[str, Any], dtype: str) -> None:
        import gguf

        self._shape, self._dtype = shape, dtype
        self._rope = rope_factors(shape, config)
        architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == shape.architecture)
        self._names = gguf.get_tensor_name_map(architecture, shape.num_layers)
        self._places: dict[str, tuple[Path, str]] = {}
        for file in sorted(path.glob("*.safetensors")):
            self._places |= {self._name(key): (file, key) for key in self._keys(file)}

    def _keys(self, file: Path) -> list[str]:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as held:
            keys = [key for key in held.keys() if not key.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
        return [key for key in keys if not (self._shape.tied and key == "lm_head.weight")]

    def _name(self, key: str) -> str:
        name: str | None = self._names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError(f"llama.cpp has no place for the weight {key}")
        return name

    def kind(self, num_dims: int) -> Any:
        """Return the type that a weight is written in: vectors stay in fp32, as llama.cpp asks."""
        import gguf

        types = gguf.GGMLQuantizationType
        matrix = {"float32": types.F32, "bfloat16": types.BF16, "float16": types.F16}[self._dtype]
        return types.F32 if num_dims == 1 else matrix

    def array_type(self, kind: Any) -> Any:
        """Return numpy's type of what is written in `kind`; numpy has no bf16."""
        import numpy

        return numpy.dtype({"F32": numpy.float32, "F16": numpy.float16}.get(kind.name, numpy.int16))

    def infos(self) -> Iterator[tuple[str, tuple[int, ...], int, Any]]:
        """Yield name, shape, bytes and type of each."""
        from safetensors import safe_open

        for name, (file, key) in self._places.items():
            with safe_open(file, framework="pt") as held:
                shape = tuple(held.get_slice(key).get_shape())
            kind = self.kind(len(shape))
            yield name, shape, math.prod(shape) * self.array_type(kind).itemsize, kind
        if self._rope:
            yield "rope_freqs.weight", (len(self._rope),), 4 * len(self._rope), self.kind(1)

    def arrays(self) -> Iterator[Any]:
        """Yield each as it is written."""
        import numpy
        import torch
        from safetensors import safe_open

        for file, key in self._places.values():
            with safe_open(file, framework="pt") as held:
                weight = _turned(held.get_tensor(key), key, self._shape)
            wanted = torch.float32 if weight.dim() == 1 else getattr(torch, self._dtype)
            weight = weight.to(wanted).contiguous()
            as_bits = weight.view(torch.int16) if wanted is torch.bfloat16 else weight
            yield as_bits.numpy()
        if self._rope:
            yield numpy.array(self._rope, numpy.float32)


def _turned(weight: Any, key: str, shape: Shape) -> Any:
    """Return rows of query and key as llama.cpp's `llama` rotates them: in pairs of neighbours.

    Hugging Face rotates row i of a head with row i + head_dim / 2; the other architectures of
    llama.cpp do as well.
    """
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(key.split(".")[-2])
    if heads is None or shape.architecture != "llama":
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def rope_factors(shape: Shape, config: Mapping[str, Any]) -> list[float]:
    """Return by what Llama 3 divides each frequency of RoPE; empty for other models.

    Wavelengths longer than context / low_freq_factor are stretched by `factor`, those shorter than
    context / high_freq_factor are not, with a straight line between (Llama 3.1's release).
    """
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return []
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for place in range(0, shape.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (place / shape.head_dim)
        share = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - share) / factor + share))
    return factors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    return read


def main() -> None:
    """Write what the arguments name; exit 1 with one sentence when it cannot be written."""
    parser = argparse.ArgumentParser(prog="headway.engines.models.to_gguf", description=__doc__)
    parser.add_argument("--model-json", required=True, help="the model, a ModelFolder as JSON")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--home", type=Path, default=default_home(), help="where models are kept")
    arguments = parser.parse_args()
    try:
        model = ModelFolder.from_json(json.loads(arguments.model_json))
        file = convert_once(model, arguments.dtype, arguments.home)
    except (ModelError, ValueError) as error:
        sys.exit(f"headway: {error}")
    sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
