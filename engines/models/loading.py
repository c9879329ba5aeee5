"""A model folder to a torch model, in the precision and on the device asked for.

Synthetic models get their weights here, straight on the device: a hash of (seed, parameter, place)
scaled to each matrix's width. Only integer operations and one exact conversion make it, so that the
same seed gives the same weights on every device, and up to rounding in every precision.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.models.synthetic import parse_seed

DTYPES = ("float32", "bfloat16", "float16")
CHUNK = 1 << 24
WORD = (1 << 32) - 1


def load(folder: ModelFolder, dtype: str, device: str, attention: str = "sdpa") -> PreTrainedModel:
    """Return the model in eval mode, every weight in `dtype` on `device`.

    In float32 the process computes without TF32 from here on. Raises ModelError with one sentence.
    """
    precision = _precision(dtype)
    place = _device(device)
    if dtype == "float32":
        torch.set_float32_matmul_precision("highest")
    try:
        if folder.synthetic:
            model = _invent(folder, precision, place, attention)
        else:
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder.path,
                dtype=precision,
                device_map={"": place},
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            _check_complete(folder, loading)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{folder.name} in {dtype} does not fit in the memory of {device}"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"cannot load {folder.name} from {folder.path} in {dtype} on {device} with "
            f"{attention} attention: {' '.join(str(error).split())}"
        ) from error
    return model.eval()


def _check_complete(folder: ModelFolder, loading: Mapping[str, Any]) -> None:
    """A weight that the folder lacks would be random, and two processes would disagree on it."""
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, loading.get(kind) or ()))
        if names:
            raise ModelError(
                f"{folder.path} does not hold all of the model: {len(names)} {kind.split('_')[0]} "
                f"weights, {names[0]} the first"
            )


def _precision(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return getattr(torch, dtype)


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device must be like cpu, cuda or cuda:1, not {device!r}") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs, so no {device!r}"
        )
    return place


def _invent(
    folder: ModelFolder, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    fill_with_noise(model, parse_seed(folder.revision))
    return model


def fill_with_noise(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every weight, so that logits are finite and depend on the whole context.

    Matrices keep the scale of what they multiply, except that attention scores and logits are a few
    units wide, and what a layer adds is small enough that the sum over all layers has unit scale.
    """
    num_layers = model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.detach().fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        gain = 1.0
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            gain = 1.5
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            gain = 2.0 / num_layers**0.5
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            gain = 4.0
        scale = gain / weight.shape[1] ** 0.5
        _fill(weight.detach().view(-1), zlib.crc32(f"{seed} {name}".encode()), scale)


def _fill(flat: torch.Tensor, key: int, std: float) -> None:
    """Write a hash of each place, as uniform numbers of the given standard deviation."""
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        word = torch.arange(start, stop, dtype=torch.int64, device=flat.device)
        word = _mix(_mix(word) ^ key)
        unit = (word >> 8).to(torch.float32) * 2.0**-23 - 1.0
        flat[start:stop] = unit * (3.0**0.5 * std)


def _mix(word: Any) -> Any:
    """Mix the bits of 32-bit words held in int64: multiply and shift, each step invertible."""
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        word = word ^ (word >> 16)
        word = (word * multiplier) & WORD
    return word ^ (word >> 16)
