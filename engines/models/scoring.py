"""Logits of a transformers model to numbers about tokens: the ground that outputs are judged on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from headway.engines.models.scores import Scores
from headway.engines.models.spelling import Option, Options


class NotFiniteError(ArithmeticError):
    """The reference computed a NaN or an infinity: nothing can be judged by it."""


def score_logits(logits: torch.Tensor, output: Sequence[int], banned: Sequence[int] = ()) -> Scores:
    """Judge `output` by `logits` [num_tokens, vocab_size], whose row t predicts output[t].

    The `banned` ids come after all others, by a gap that no tolerance allows. Raises
    NotFiniteError.
    """
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the reference computed logits that are not finite")
    logits = without(logits, banned)
    tokens = torch.tensor(output, device=logits.device)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    top = logits.topk(2, dim=-1)
    return Scores(
        gaps=(top.values[:, 0] - chosen).tolist(),
        ranks=(logits > chosen[:, None]).sum(-1).tolist(),
        margins=(top.values[:, 0] - top.values[:, 1]).tolist(),
        best=top.indices[:, 0].tolist(),
        logprobs=(chosen - logits.logsumexp(-1)).tolist(),
    )


def without(logits: torch.Tensor, banned: Sequence[int]) -> torch.Tensor:
    """Return logits [..., vocab_size] in which the `banned` ids come after all others."""
    if not banned:
        return logits
    # Not -inf: a gap is a number, in files as well.
    places = torch.tensor(list(banned), device=logits.device)
    return logits.index_fill(-1, places, torch.finfo(logits.dtype).min)


def score(
    model: PreTrainedModel,
    prompt: Sequence[int],
    output: Sequence[int],
    banned: Sequence[int] = (),
) -> Scores:
    """Judge `output` after `prompt` by one teacher-forced forward: no batch, padding or cache."""
    ids = torch.tensor([[*prompt, *output[:-1]]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(output)).logits[0]
        return score_logits(logits.float(), output, banned)


def options(
    model: PreTrainedModel, prompt: Sequence[int], epsilon: float, banned: Sequence[int] = ()
) -> Options:
    """Continue a prompt by whichever tokens are sent; yields those within `epsilon` logits.

    One token a pass, with a cache. Raises NotFiniteError.
    """
    cache, ids = DynamicCache(config=model.config), list(prompt)
    while True:
        tensor = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            made = model(input_ids=tensor, past_key_values=cache, use_cache=True, logits_to_keep=1)
            near = near_best(made.logits[0, -1].float(), epsilon, banned)
        ids = [(yield near)]


def near_best(logits: torch.Tensor, epsilon: float, banned: Sequence[int] = ()) -> list[Option]:
    """Return the tokens within `epsilon` of the best logit [vocab_size] that is not `banned`."""
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the reference computed logits that are not finite")
    logits = without(logits, banned)
    top = logits.topk(2).values.tolist()
    tokens = (top[0] - logits <= epsilon).nonzero()[:, 0]
    chosen = logits[tokens].tolist()
    normal = logits.logsumexp(-1).item()
    pairs = sorted(zip(chosen, tokens.tolist(), strict=True), key=lambda pair: -pair[0])
    above = {logit: rank for rank, (logit, _) in reversed(list(enumerate(pairs)))}
    return [
        Option(token, top[0] - logit, above[logit], top[0] - top[1], logit - normal)
        for logit, token in pairs
    ]


def generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_tokens: int,
    eos_ids: Sequence[int],
    banned: Sequence[int] = (),
) -> list[int]:
    """Return transformers' own greedy continuation.

    It ends after one of `eos_ids`; with none given, the model may emit them and goes on. Ids that
    are `banned` are not chosen.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    # What a configuration leaves open is filled in from the checkpoint's own, which may sample,
    # punish repetition, or end at its own tokens: so both are fresh.
    model.generation_config = GenerationConfig()
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos_ids) if eos_ids else None,
        pad_token_id=0,
        suppress_tokens=list(banned) or None,
    )
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    continuation: list[int] = made[0, ids.shape[1] :].tolist()
    return continuation
