"""Turn SmolLM2's GGUF file into the plain fp32 folder that every engine can load."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from headway.engines.models.folder import ModelError


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` to `folder`."""
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are dequantised by now, but the model still calls itself quantised, and refuses
    # to be saved for it.
    del model.config.quantization_config, model.hf_quantizer
    model.is_quantized = False
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise ModelError(f"cannot write the converted model: {error}") from error
