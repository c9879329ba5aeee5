from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from transformers import PreTrainedModel

from headway.engines.contract import Submission

Greedy = Callable[..., list[int]]


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
