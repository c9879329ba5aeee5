from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from transformers import PreTrainedModel

from headway.engines.contract import Submission
from headway.engines.models import ModelFolder

Greedy = Callable[..., list[int]]
FAMILIES = {
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32},
    "llama": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.fixture
def compiler() -> None:
    """Skip where torch finds no C++ compiler."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler that torch finds")


@pytest.fixture(scope="session")
def greedy() -> Greedy:
    """What transformers' own `generate` answers a request; it ends at `eos_ids`, if there are."""

    def of(
        model: PreTrainedModel, submission: Submission, eos_ids: Collection[int] = ()
    ) -> list[int]:
        prompt = torch.tensor([submission.prompt_token_ids])
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=submission.max_tokens,
            do_sample=False,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=0,
        )
        new: list[int] = tokens[0, prompt.shape[1] :].tolist()
        return new

    return of


@pytest.fixture
def invented(tmp_path: Path) -> Callable[..., ModelFolder]:
    """A small random model of a family, on disk as safetensors."""

    def of(family: str, **more: Any) -> ModelFolder:
        fields = {
            "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
            "num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 300,
            "max_position_embeddings": 700, "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip
        config = transformers.AutoConfig.for_model(family, **{**fields, **FAMILIES[family], **more})
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():  # biases and norms as well, or nobody misses them
            torch.nn.init.normal_(weight, mean=1.0 if weight.dim() == 1 else 0.0, std=0.3)
        model.save_pretrained(tmp_path)
        return ModelFolder("invented", tmp_path, "r", 300, (0, 1), (1,), 700)

    return of
