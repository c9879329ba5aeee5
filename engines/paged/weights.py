"""A model's weights as its passes read them: Llama, and Qwen2, 2.5 and 3, all dense.

transformers loads them, so that every folder and every synthetic shape that the reference reads is
read here as well; then its modules are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.engines.models.folder import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")

# A matrix product [tokens, in] → [tokens, out], in whatever form its weight is kept.
Linear = Callable[[Tensor], Tensor]
Packed = TypeVar("Packed")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes; `group` query heads read one KV head."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices that read the same input: [(out, in), …] with their biases, one after the other."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    def fused(self) -> Projection:
        """Return the same as one matrix."""
        biases = [bias for bias in self.biases if bias is not None]
        return Projection((torch.cat(self.weights),), (torch.cat(biases) if biases else None,))

    def packed(self, pack: Callable[[Tensor, Tensor | None], Packed]) -> tuple[Packed, ...]:
        """Return what `pack` makes of each."""
        return tuple(pack(*pair) for pair in zip(self.weights, self.biases, strict=True))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `q_norm` and `k_norm` [head_dim] are Qwen3's, else None."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `cos` and `sin` [context_length, head_dim / 2] are fp32.

    `head` [vocab_size, hidden_size] is `embedding` itself where the two are tied.
    """

    shape: Shape
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def num_bytes(self) -> int:
        """What one decode step reads of them: all but the embedding, unless it is the head."""
        parts = [self.norm, self.head]
        for layer in self.layers:
            for one in (layer.qkv, layer.out, layer.gate_up, layer.down):
                parts += [*one.weights, *(bias for bias in one.biases if bias is not None)]
            parts += [layer.input_norm, layer.post_norm]
        return sum(part.nbytes for part in parts)


def read(model: PreTrainedModel, fused: bool) -> Weights:
    """Take a loaded model apart; `fused` makes one matrix of Q, K and V, and of gate and up.

    The model gives each layer up as it is read, so that no more than one layer is there twice.
    Raises ModelError for another family, or for what a member of it does otherwise.
    """
    shape = _shape(model.config)
    inner: Any = model.model
    layers = []
    for place in range(shape.num_layers):
        layers.append(_layer(inner.layers[place], fused))
        inner.layers[place] = torch.nn.Identity()
    device = model.device
    cos, sin = _rotary(inner.rotary_emb, shape.context_length, device)
    return Weights(
        shape=shape,
        embedding=inner.embed_tokens.weight.detach(),
        layers=tuple(layers),
        norm=inner.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        cos=cos,
        sin=sin,
    )


def _shape(config: Any) -> Shape:
    family = config.model_type
    if family not in FAMILIES:
        raise ModelError(f"paged serves dense {', '.join(FAMILIES)} models, not {family!r}")
    if config.hidden_act != "silu":
        raise ModelError(f"paged knows the activation silu, not {config.hidden_act!r}")
    sliding = {kind for kind in getattr(config, "layer_types", None) or () if "sliding" in kind}
    if sliding or (family == "llama" and getattr(config, "mlp_bias", False)):
        raise ModelError("paged knows neither sliding windows nor biases in an MLP")
    kind = config.rope_parameters["rope_type"]
    if kind in ("dynamic", "longrope"):
        raise ModelError(f"paged has one table of angles, and {kind} RoPE changes with the length")
    num_heads = config.num_attention_heads
    return Shape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        mlp_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
    )


def _layer(layer: Any, fused: bool) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _projection(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = _projection(mlp.gate_proj, mlp.up_proj)
    q_norm, k_norm = (getattr(attention, f"{name}_norm", None) for name in "qk")
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=qkv.fused() if fused else qkv,
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        out=_projection(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=gate_up.fused() if fused else gate_up,
        down=_projection(mlp.down_proj),
    )


def _projection(*modules: Any) -> Projection:
    biases: Sequence[Tensor | None] = [
        None if module.bias is None else module.bias.detach() for module in modules
    ]
    return Projection(tuple(module.weight.detach() for module in modules), tuple(biases))


def _rotary(module: Any, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, as transformers computes them."""
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * module.inv_freq.to(device=device, dtype=torch.float32)
    scale = module.attention_scaling
    return angles.cos() * scale, angles.sin() * scale
