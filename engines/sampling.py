"""The choice of a next token from logits, in the engines of this repository."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.engines.contract import Submission

# Below it sampling is greedy in all but name, and a division by it may not be finite in fp32.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a request that is not greedy draws: its own generator, so neighbours do not matter."""

    temperature: float
    top_p: float
    generator: torch.Generator

    @classmethod
    def of(cls, submission: Submission, device: torch.device | str) -> Sampler | None:
        """Return a request's sampler; None for a greedy one."""
        if submission.temperature < MIN_TEMPERATURE:
            return None
        generator = torch.Generator(device=device)
        if submission.seed is None:
            generator.seed()
        else:
            generator.manual_seed(submission.seed)
        return cls(submission.temperature, submission.top_p, generator)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token, drawn by its logits [vocab_size] in fp32; nothing waits for a GPU."""
        # Relative to the largest, so that nothing overflows.
        weights = torch.softmax((logits - logits.max()) / self.temperature, dim=-1)
        if self.top_p < 1:
            largest, order = weights.sort(descending=True, stable=True)
            before = largest.cumsum(dim=-1) - largest
            # The smallest set that reaches top_p: a token stays if those before it do not.
            weights = torch.zeros_like(weights)
            kept = before < self.top_p
            kept[0] = True  # also where top_p is 0 in fp32
            weights[order] = torch.where(kept, largest, 0.0)
        return torch.multinomial(weights, 1, generator=self.generator)[0]


def choose(logits: torch.Tensor, samplers: Sequence[Sampler | None]) -> torch.Tensor:
    """Return each row's next token [rows]: the first of its largest fp32 logits, or a draw."""
    logits = logits.float()
    tokens = logits.argmax(dim=-1)
    for place, sampler in enumerate(samplers):
        if sampler is not None:
            tokens[place] = sampler.draw(logits[place])
    return tokens
