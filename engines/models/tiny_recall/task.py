"""What tiny_recall knows: to follow records that stand in its prompt.

A prompt is `<bos>`, then records `a b` ("after a comes b") at random distances with filler between
them, then `<query> a <then>`. The records form one random cycle over their symbols. The right
continuation walks along it: the successor of `a`, `<then>`, the successor of that, `<then>`, ...

So each second token needs one record at a random, distant place of the KV cache, and also the
entry written one step before, since `<then>` itself does not say whose successor is wanted: a lost,
stale, foreign or misplaced entry of either kind changes the text. With twice as many tokens as
there are records, the answer needs each record exactly once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

VOCAB_SIZE = 128
CONTEXT_LENGTH = 512
BOS, EOS, PAD, QUERY, THEN = range(5)
FILLER = range(5, 16)
SYMBOLS = range(16, VOCAB_SIZE)

FILLER_RUNS = (1, 1, 1, 2, 3)
MIN_RECORDS = 2
MIN_PROMPT_TOKENS = 12
FRAME_TOKENS = 5  # <bos>; one filler, <query>, the symbol asked for, <then>


def recall_prompt(
    seed: int | random.Random, num_tokens: int, num_output: int = 32
) -> tuple[list[int], list[int]]:
    """Make a prompt of exactly `num_tokens` ids, and the `num_output` ids that must follow it.

    A pure function of the seed (or of the generator's state). Prompt and output together must fit
    in the context; else, or with fewer than 12 tokens, ValueError.
    """
    if num_tokens < MIN_PROMPT_TOKENS or num_tokens + num_output > CONTEXT_LENGTH:
        raise ValueError(
            f"tiny_recall takes prompts of {MIN_PROMPT_TOKENS} tokens or more that fit with their "
            f"output in {CONTEXT_LENGTH}, not {num_tokens} with {num_output} of output"
        )
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    runs = _filler_runs(rng, num_tokens - FRAME_TOKENS)
    cycle = rng.sample(SYMBOLS, len(runs))
    records = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    rng.shuffle(records)
    body = [BOS]
    for run, record in zip(runs, records, strict=True):
        body += [*rng.choices(FILLER, k=run), *record]
    padding = num_tokens - len(body) - 3
    prompt = [*body, *rng.choices(FILLER, k=padding), QUERY, cycle[0], THEN]
    return prompt, expected_output(prompt, num_output)


def expected_output(prompt: Sequence[int], num_output: int) -> list[int]:
    """Read the records of a prompt and walk them: the right greedy continuation.

    Raises KeyError when the walk comes to a symbol that no record begins with.
    """
    successor = dict(find_records(prompt))
    symbol = prompt[-2]
    output: list[int] = []
    while len(output) < num_output:
        symbol = successor[symbol]
        output += [symbol, THEN]
    return output[:num_output]


def find_records(prompt: Sequence[int]) -> list[tuple[int, int]]:
    """Return the records `(a, b)` in a prompt, in their order there."""
    return [(a, b) for a, b in itertools.pairwise(prompt[:-3]) if a in SYMBOLS and b in SYMBOLS]


def _filler_runs(rng: random.Random, budget: int) -> list[int]:
    """Lengths of the filler before each record, for as many records as `budget` tokens hold."""
    runs = [1] * MIN_RECORDS
    used = sum(runs) + 2 * MIN_RECORDS
    while len(runs) < len(SYMBOLS):
        run = rng.choice(FILLER_RUNS)
        if used + run + 2 > budget:
            break
        runs.append(run)
        used += run + 2
    rng.shuffle(runs)
    return runs
