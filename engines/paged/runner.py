"""Passes of a model over its cache: the one place that knows kernels, graphs and devices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.engines.models.folder import ModelFolder
from headway.engines.models.loading import load
from headway.engines.paged import weights
from headway.engines.paged.attention.choose import choose as choose_attention
from headway.engines.paged.batch import Batch, Carried
from headway.engines.paged.compiled import CompiledDecode
from headway.engines.paged.graphs import GraphedDecode
from headway.engines.paged.memory import longest_of, num_blocks_of, policy_of
from headway.engines.paged.model import Decoder, new_cache
from headway.engines.paged.native import (
    Library,
    NativeAttention,
    NativeOps,
    Step,
    available,
)
from headway.engines.paged.ops import Ops, TorchOps
from headway.engines.paged.options import KIND, RUNGS, PagedOptions
from headway.engines.paged.profile import Profile
from headway.engines.sampling import Sampler, choose


class Runner:
    """A loaded model, its cache, and the fastest way here to pass a batch through them."""

    def __init__(self, folder: ModelFolder, dtype: str, device: str, options: PagedOptions) -> None:
        rung = RUNGS[options.rung]
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        loaded = load(folder, dtype, device)
        self.device: torch.device = loaded.device
        self.weights = weights.read(loaded, rung.fused)
        shape, like = self.weights.shape, self.weights.embedding
        self.policy = policy_of(options, self.device)
        self.max_model_len = longest_of(options, shape)
        self.block_size = self.max_model_len if rung.contiguous else options.block_size
        self.num_blocks = num_blocks_of(
            options, self.policy, shape, self.block_size, self.device, like.element_size()
        )
        self.ops, library = _ops(options, self.device, like.dtype)
        self.attention = choose_attention(
            options.attention or rung.attention,
            self.device,
            like.dtype,
            shape.head_dim,
            self.block_size,
            None if library is None else NativeAttention(library),
        )
        self.profile = Profile(self.device) if options.profile else None
        # The last block is nobody's: padding of recorded steps is written there.
        self.cache = new_cache(shape, self.num_blocks + rung.graphs, self.block_size, like)
        self._layers = self.cache.layers()
        timed = {} if self.profile is None else {"timed": self.profile.timed}
        self.decoder = Decoder(self.weights, self.ops, self.attention, **timed)
        self._recorded: GraphedDecode | CompiledDecode | None = None
        self._native: Step | None = None
        if rung.graphs and self.profile is None:
            self._record(options)

    def run(
        self, batch: Batch, samplers: Sequence[Sampler | None], carried: Carried | None = None
    ) -> Tensor:
        """Pass a batch that is on the host; returns the next token of each row that ends.

        They are int64, [S], and on the device; `carried` are such tokens of the pass before.
        """
        # Not inference_mode: tensors made in it are of another kind, which compiled steps, made for
        # those that come from outside, would be compiled for again.
        with torch.no_grad():
            if self.profile is None:
                return self._run(batch, samplers, carried)
            with self.profile.part("pass"):
                return self._run(batch, samplers, carried)

    def names(self) -> dict[str, str]:
        """Say what passes go through."""
        step, decodes = self._recorded or self._native, self._recorded or self
        return {
            "attention": self.attention.name,
            "decode_attention": decodes.attention.name,
            "kernels": self.ops.name,
            "decode_step": "eager" if step is None else step.name,
        }

    def _run(
        self, batch: Batch, samplers: Sequence[Sampler | None], carried: Carried | None
    ) -> Tensor:
        greedy = not any(samplers)
        if self._recorded is not None and batch.num_decodes == batch.num_rows:
            ids = carried and carried.fill(batch.ids.to(self.device, non_blocking=True))
            tokens, hidden = self._recorded(batch, ids)
            # A copy: the next step may come before this one is read.
            return tokens.clone() if greedy else choose(self.decoder.logits(hidden), samplers)
        if self._native is not None:
            if carried is not None:
                carried.fill(batch.ids)
            if greedy:
                return self._native(batch)
            hidden = self._native(batch, want_hidden=True)
            return choose(self.decoder.logits(hidden), samplers)
        placed = batch.to(self.device)
        if carried is not None:
            carried.fill(placed.ids)
        hidden = self.decoder.hidden(placed, self._layers)
        if not len(hidden):
            return placed.last  # no row ends here: there is nothing to choose
        return choose(self.decoder.logits(hidden), samplers)

    def _record(self, options: PagedOptions) -> None:
        """Make decode steps one unit, where this device and precision have one."""
        if self.device.type == "cuda" and self.attention.capturable:
            self._recorded = GraphedDecode(
                self.decoder,
                self.ops,
                self.attention,
                self.cache,
                max_rows=self.policy.max_num_seqs,
                max_width=-(-self.max_model_len // self.block_size),
            )
        elif isinstance(self.ops, NativeOps):
            # A whole pass has no attention but its own.
            ours = isinstance(self.attention, NativeAttention)
            if ours and _passes_whole(self.ops.library, self.weights.embedding.dtype):
                self._native = Step(self.ops.library, self.weights, self.cache, self.ops.packer)
        elif self.device.type == "cpu" and options.compile:
            try:
                with torch.no_grad():
                    self._recorded = CompiledDecode(self.weights, self.cache)
            except RuntimeError as error:  # torch's compilers raise nothing else
                said = " ".join(str(error).partition("\n\n")[0].split())
                warnings.warn(f"decode steps are not compiled: {said}", stacklevel=2)


def _ops(
    options: PagedOptions, device: torch.device, dtype: torch.dtype
) -> tuple[Ops, Library | None]:
    """Return the operations that were asked for, and the compiled kernels where there are any.

    Raises ValueError where `native` was asked for and cannot be had.
    """
    rung = RUNGS[options.rung]
    wanted = options.kernels or rung.kernels
    library, why = available() if device.type == "cpu" else (None, "they are for CPUs")
    if library is not None and dtype == torch.float16:
        library, why = None, "they do not know float16"
    if wanted == "native" and library is None:
        raise ValueError(f"{KIND}: argument kernels is native, and there are none: {why}")
    auto = wanted == "auto" and library is not None and _passes_whole(library, dtype)
    if library is not None and (auto or wanted == "native"):
        return NativeOps(library), library
    return TorchOps(reorder=rung.graphs), library


def _passes_whole(library: Library, dtype: torch.dtype) -> bool:
    return library.fast_bf16 and dtype == torch.bfloat16
