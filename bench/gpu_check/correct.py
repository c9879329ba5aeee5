"""Are an engine's tokens right? On `tiny_recall`, whose every next token hangs on distant ones.

Each is judged on its own prefix by transformers in float32. In float32 it must be that one's
choice, so that the whole is what `generate` writes; in bf16 it must keep to what nights allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from in_process import answers

from headway.correctness import TOLERANCES
from headway.engines.contract import Engine
from headway.engines.models import default_home, prepare
from headway.engines.models.scores import Scores
from headway.engines.models.tiny_recall.task import recall_prompt
from headway.engines.reference import TorchReference

MODEL = "tiny_recall"
# More than some rungs hold at once, so that rows come and go; lengths around those of blocks.
LENGTHS = (12, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 200, 255, 256, 257, 300)
OUTPUT_TOKENS = 24
Build = Callable[[Any, str], Engine]


def check(build: Build, device: str, dtype: str) -> dict[str, Any]:
    """Return how many outputs are right and wrong, and of the first wrong one what is wrong.

    `build` makes the engine for a model folder and a dtype.
    """
    folder = prepare(MODEL, default_home())
    asked = [recall_prompt(seed, n, OUTPUT_TOKENS)[0] for seed, n in enumerate(LENGTHS)]
    outputs = answers(build(folder, dtype), [(prompt, OUTPUT_TOKENS) for prompt in asked])
    reference = TorchReference(folder, device)
    wrong, others = [], 0
    for prompt, output in zip(asked, outputs, strict=True):
        scores = reference.score(prompt, output)
        why = wrong_in(scores, output, dtype)
        wrong += [] if why is None else [f"prompt of {len(prompt)} tokens: {why}"]
        others += sum(gap > 0 for gap in scores.gaps)
    tokens, most = sum(map(len, outputs)), TOLERANCES[dtype].max_nonargmax
    if not wrong and others > most * tokens:
        wrong.append(f"{others} of {tokens} tokens are not the best one")
    told = {"dtype": dtype, "outputs": len(outputs), "wrong": len(wrong)}
    return told | {"first_wrong": wrong[0] if wrong else None, "not_best": others}


def wrong_in(scores: Scores, output: Sequence[int], dtype: str) -> str | None:
    """Say what is wrong with an output, by what the reference thinks of its tokens; else None."""
    if len(output) != OUTPUT_TOKENS:
        return f"{len(output)} tokens instead of {OUTPUT_TOKENS}"
    if dtype == "float32":
        pairs = enumerate(zip(output, scores.best, strict=True))
        differs = next((at for at, (got, best) in pairs if got != best), None)
        return None if differs is None else f"token {differs} is not the best one"
    gap = max(scores.gaps)
    return f"a token is {gap:.2f} below the best" if gap > TOLERANCES[dtype].max_gap else None
