"""What the engines on transformers share: passes with a growing cache, the choice of a token.

A pass is a prefill of whole prompts, or one token for each row of what was prefilled. Prompts of
different lengths are padded on the left, so that the last column holds every row's next token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from headway import __version__
from headway.core import EngineInfo
from headway.engines import sampling
from headway.engines.contract import Output, Submission
from headway.engines.models.folder import ModelFolder
from headway.engines.models.loading import load
from headway.engines.sampling import Sampler


@dataclass(slots=True)
class Passed:
    """What a model has seen of some rows."""

    cache: DynamicCache
    mask: torch.Tensor | None  # [rows, seen]: 0 on padding; None where there is none
    positions: torch.Tensor  # [rows, 1]: of each row's next token


@dataclass(slots=True)
class Row:
    """A request in work. `over` rows are computed on, where others need the batch, and unheard."""

    submission: Submission
    sampler: Sampler | None
    last_token: int = 0
    num_tokens: int = 0
    over: bool = False

    def take(self, token: int, eos_ids: Collection[int]) -> Output:
        """Count a token that was chosen for this row and return what leaves."""
        self.last_token = token
        self.num_tokens += 1
        reason = self.submission.ends_with(token, self.num_tokens, eos_ids)
        self.over = reason is not None
        return Output(self.submission.id, (token,), reason)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what its passes need."""

    torch_model: PreTrainedModel
    folder: ModelFolder
    eos_ids: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.torch_model.device
        return device


def load_model(
    folder: ModelFolder, dtype: str, device: str, attention: str, threads: int | None
) -> LoadedModel:
    """Load a model; raises ModelError with a sentence."""
    if threads is not None:
        torch.set_num_threads(threads)
    return LoadedModel(load(folder, dtype, device, attention), folder, frozenset(folder.eos_ids))


def start_row(model: LoadedModel, submission: Submission) -> Row:
    """Return a new row for a request."""
    return Row(submission, Sampler.of(submission, model.device))


def prefill(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> tuple[Passed, torch.Tensor]:
    """Pass whole prompts; returns the state and the logits [rows, vocabulary] that follow them."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    padded = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    ids = torch.tensor(padded, device=model.device)
    shift = torch.tensor(padding, device=model.device).unsqueeze(1)
    columns = torch.arange(longest, device=model.device).unsqueeze(0)
    # A padding position is masked; which number it has does not matter, if it is a valid one.
    positions = (columns - shift).clamp(min=0)
    mask = (columns >= shift).long() if any(padding) else None
    passed = Passed(DynamicCache(config=model.torch_model.config), mask, positions)
    return passed, _forward(model, passed, ids)


def decode(model: LoadedModel, passed: Passed, tokens: Sequence[int]) -> torch.Tensor:
    """Pass one more token a row; returns the logits [rows, vocabulary] that follow it."""
    if passed.mask is not None:
        passed.mask = torch.nn.functional.pad(passed.mask, (0, 1), value=1)
    return _forward(model, passed, torch.tensor(tokens, device=model.device).unsqueeze(1))


def _forward(model: LoadedModel, passed: Passed, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        result = model.torch_model(
            input_ids=ids,
            attention_mask=passed.mask,
            position_ids=passed.positions,
            past_key_values=passed.cache,
            use_cache=True,
            logits_to_keep=1,
        )
    # A row that is over goes on with its batch, perhaps beyond the last position there is.
    last = model.folder.context_length - 1
    passed.positions = (passed.positions[:, -1:] + 1).clamp(max=last)
    logits: torch.Tensor = result.logits[:, -1]
    return logits


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Return the next token of each row; nothing is drawn for those that are over."""
    samplers = [None if row.over else row.sampler for row in rows]
    tokens: list[int] = sampling.choose(logits, samplers).tolist()
    return tokens


def describe(kind: str, model: LoadedModel, settings: Mapping[str, object]) -> EngineInfo:
    """Return what is running, read back from the model and from torch."""
    torch_model = model.torch_model
    read_back = {
        "attention": torch_model.config._attn_implementation,
        "cache": DynamicCache.__name__,
        "context_length": model.folder.context_length,
        "model_revision": model.folder.revision,
        "threads": torch.get_num_threads(),
    }
    if model.device.type == "cuda":
        read_back["device_name"] = torch.cuda.get_device_name(model.device)
    return EngineInfo(
        kind=kind,
        version=__version__,
        model=model.folder.name,
        dtype=str(torch_model.dtype).removeprefix("torch."),
        device=str(model.device),
        settings={**settings, **read_back},
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def memory_stats(model: LoadedModel) -> Mapping[str, float]:
    """Return what torch holds of the GPU's memory; nothing on a CPU."""
    if model.device.type != "cuda":
        return {}
    return {
        "gpu_allocated_bytes": torch.cuda.memory_allocated(model.device),
        "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated(model.device),
    }
