"""How many bytes of weights one decode step reads, from a model's configuration. Pure.

Llama and Qwen2, 2.5 and 3, dense. A token's row of the embedding is next to nothing; the output
head is read whole, whether it is the embedding again (tied) or a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TYPES = ("llama", "qwen2", "qwen3")


def step_bytes(config: Mapping[str, Any], dtype: str) -> int | None:
    """Return the bytes that a decode step reads of the weights; None for an unknown model type."""
    if config.get("model_type") not in TYPES:
        return None
    return DTYPE_BYTES[dtype] * _step_parameters(config)


def _step_parameters(config: Mapping[str, Any]) -> int:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    kv = int(config.get("num_key_value_heads") or heads)
    queries, keys = heads * head, kv * head
    attention = hidden * (2 * queries + 2 * keys)
    if config["model_type"] == "qwen2" or config.get("attention_bias"):
        attention += queries + 2 * keys
    if config["model_type"] == "qwen3":
        attention += 2 * head
    layer = attention + 3 * hidden * int(config["intermediate_size"]) + 2 * hidden
    return int(config["num_hidden_layers"]) * layer + hidden + int(config["vocab_size"]) * hidden
