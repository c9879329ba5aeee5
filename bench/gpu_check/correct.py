"""Are an engine's tokens right? On `tiny_recall`, whose every next token hangs on distant ones.

In float32 token for token as transformers' own `generate`; in bf16 within the tolerance that nights
have, by the logits of transformers in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from in_process import answers

from headway.correctness import TOLERANCES
from headway.engines.contract import Engine
from headway.engines.models import default_home, prepare
from headway.engines.models.tiny_recall.task import recall_prompt
from headway.engines.reference import TorchReference

MODEL = "tiny_recall"
# More than some rungs hold at once, so that rows come and go; lengths around block sizes.
LENGTHS = (12, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 200, 255, 256, 300)
OUTPUT_TOKENS = 40
Build = Callable[[Any, str], Engine]


def check(build: Build, device: str, dtype: str) -> dict[str, Any]:
    """Return how many outputs are right and wrong, and of the first wrong one what is wrong.

    `build` makes the engine for a model folder and a dtype.
    """
    folder = prepare(MODEL, default_home())
    asked = [(recall_prompt(seed, n, OUTPUT_TOKENS)[0], n) for seed, n in enumerate(LENGTHS)]
    engine = build(folder, dtype)
    outputs = answers(engine, [(prompt, OUTPUT_TOKENS) for prompt, _ in asked])
    reference = TorchReference(folder, device)
    judge = partial(_same if dtype == "float32" else _within, reference, dtype)
    wrong = []
    for (prompt, length), output in zip(asked, outputs, strict=True):
        why = judge(prompt, output)
        wrong += [] if why is None else [f"prompt of {length} tokens: {why}"]
    told = {"dtype": dtype, "outputs": len(outputs), "wrong": len(wrong)}
    return told | {"first_wrong": wrong[0] if wrong else None}


def _same(
    reference: TorchReference, dtype: str, prompt: list[int], output: tuple[int, ...]
) -> str | None:
    wanted = reference.generate(prompt, OUTPUT_TOKENS, ignore_eos=True)
    if list(output) == wanted:
        return None
    pairs = zip(output, wanted, strict=False)
    at = next((k for k, (got, want) in enumerate(pairs) if got != want), len(output))
    return f"token {at} of {len(output)} is not what transformers writes ({dtype})"


def _within(
    reference: TorchReference, dtype: str, prompt: list[int], output: tuple[int, ...]
) -> str | None:
    tolerance, gaps = TOLERANCES[dtype], reference.score(prompt, output).gaps
    if len(output) != OUTPUT_TOKENS:
        return f"{len(output)} tokens instead of {OUTPUT_TOKENS}"
    if max(gaps) > tolerance.max_gap:
        return f"a token is {max(gaps):.2f} logits below the best one ({dtype})"
    return None
