"""Passes of a model over its cache: the one place that knows kernels, graphs and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.engines.models.folder import ModelFolder
from headway.engines.models.loading import load
from headway.engines.paged import weights
from headway.engines.paged.attention import Attention
from headway.engines.paged.attention.plain import Plain
from headway.engines.paged.attention.sdpa import Sdpa
from headway.engines.paged.batch import Batch
from headway.engines.paged.memory import longest_of, num_blocks_of, policy_of
from headway.engines.paged.model import Decoder, new_cache
from headway.engines.paged.native import DecodeStep, NativeAttention, NativeOps, available
from headway.engines.paged.ops import Ops, TorchOps
from headway.engines.paged.options import RUNGS, PagedOptions
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
        wanted = options.kernels or rung.kernels
        library = available()[0]
        self.ops: Ops = TorchOps() if wanted == "torch" or library is None else NativeOps(library)
        self.attention: Attention = Plain() if options.attention == "plain" else Sdpa()
        if library is not None and (options.attention or rung.attention) in ("auto", "native"):
            self.attention = NativeAttention(library)
        self.profile = Profile(self.device) if options.profile else None
        self.cache = new_cache(shape, self.num_blocks, self.block_size, like)
        timed = {} if self.profile is None else {"timed": self.profile.timed}
        self.decoder = Decoder(self.weights, self.ops, self.attention, **timed)
        self.decode: Callable[[Batch], Tensor] | None = None
        if (
            rung.graphs
            and isinstance(self.ops, NativeOps)
            and like.dtype == torch.bfloat16
            and self.profile is None
        ):
            self.decode = DecodeStep(library, self.weights, self.cache, 64, self.ops.packer)

    def run(self, batch: Batch, samplers: Sequence[Sampler | None]) -> Tensor:
        """Pass a batch; returns the next token of each row that ends [S] int64, on the device."""
        with torch.inference_mode():
            if self.profile is None:
                return self._run(batch, samplers)
            with self.profile.part("pass"):
                return self._run(batch, samplers)

    def _run(self, batch: Batch, samplers: Sequence[Sampler | None]) -> Tensor:
        greedy = not any(samplers)
        if self.decode is not None and greedy and batch.num_decodes == batch.num_rows <= 64:
            return self.decode(batch)
        hidden = self.decoder.hidden(batch, self.cache)
        if not len(hidden):
            return batch.last  # no row ends here: there is nothing to choose
        return choose(self.decoder.logits(hidden), samplers)

    def names(self) -> dict[str, str]:
        """Say what passes go through."""
        step = "eager" if self.decode is None else type(self.decode).__name__
        return {"attention": self.attention.name, "kernels": self.ops.name, "decode": step}
