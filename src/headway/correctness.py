"""Are the outputs of the timed requests right? Token by token, against the reference's logits.

For an output y after a prompt p, the reference gives logits z_t in one teacher-forced pass over
p‖y, and gap_t = max z_t − z_t[y_t]. An engine whose logits are within η of the reference's (up to
a common shift) emits only tokens with gap ≤ 2η, so ε = 2η is the tolerance, per dtype. It does not
matter where an output leaves the reference's own greedy text: each prefix is the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.core import Case, Request, RequestRecord, Run, Verification
from headway.results import Results
from headway.workload import Vocabulary, make_requests, pair_key


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Per dtype of the engine: the largest gap, in logits, and the share of tokens with any gap.

    Sources: rounding of bf16 and fp16 logits between 16 and 32 (0.125 and 0.0156), what vLLM's and
    SGLang's own suites allow; in fp32 the same noise is near 1e-6, so exact tokens are a fair
    demand and a gap beyond 1e-3 is a wrong token.
    """

    epsilon: float
    max_nonargmax: float


TOLERANCES = {
    "float32": Tolerance(1e-3, 0.001),
    "float16": Tolerance(0.10, 0.01),
    "bfloat16": Tolerance(0.25, 0.02),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and what an engine answered, to be verified once."""

    key: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Equality:
    """What verification says of one case."""

    num_requests: int = 0
    num_tokens: int = 0
    num_nonargmax: int = 0
    wrong: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


def requests_of(results: Results, run: Run) -> tuple[Request, ...]:
    """Make a Run's requests again: prompts are never stored."""
    facts = results.models[run.case.model]
    prompts = results.suite.workload(run.case.workload).prompts
    vocabulary = Vocabulary(facts.vocab_size, facts.special_ids)
    n = run.level.num_requests
    return make_requests(prompts, n, run.launch, results.suite.seed, vocabulary)


def launch_prompt(results: Results, model: str) -> tuple[int, ...]:
    """Return the short prompt whose answer ends a launch's start."""
    facts = results.models[model]
    ids = Vocabulary(facts.vocab_size, facts.special_ids).ordinary_ids()
    return tuple(ids[(7 * k + 3) % len(ids)] for k in range(8))


def pairs(results: Results, model: str) -> Iterator[Pair]:
    """Yield every answer of a model's instances once: launches' first tokens, then Runs'."""
    seen: set[str] = set()
    for prompt, output in _answers(results, model):
        key = pair_key(prompt, output)
        if output and key not in seen:
            seen.add(key)
            yield Pair(key, prompt, output)


def _answers(results: Results, model: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for launch in results.launches:
        if results.suite.instance(launch.instance).model == model:
            yield launch_prompt(results, model), launch.first_output
    for run in results.runs:
        if run.case.model == model:
            for request, record in zip(requests_of(results, run), run.records, strict=True):
                if record.completed:
                    yield request.prompt_token_ids, record.output_token_ids or ()


def equality(results: Results, case: Case) -> Equality:
    """Judge every completed request of a case, over all launches."""
    tolerance = TOLERANCES[results.suite.instance(case.instance).dtype]
    wrong: list[str] = []
    unverified: list[str] = []
    requests = tokens = nonargmax = 0
    for launch, run in sorted(results.runs_of(case).items()):
        for request, record in zip(requests_of(results, run), run.records, strict=True):
            if not record.completed:
                continue
            requests += 1
            where = f"launch {launch} request {record.index}"
            verification = _find(results, request, record)
            if verification is None:
                unverified.append(f"{where} was not verified")
            elif verification.error is not None:
                unverified.append(f"{where}: {verification.error}")
            else:
                tokens += verification.num_tokens
                nonargmax += verification.num_nonargmax
                wrong += _wrong_tokens(where, verification, tolerance)
    allowed = math.ceil(tolerance.max_nonargmax * tokens)
    if nonargmax > allowed:
        wrong.append(f"{nonargmax} of {tokens} tokens are not the reference's, {allowed} allowed")
    wrong += _generated_differences(results, case)
    return Equality(requests, tokens, nonargmax, tuple(wrong), tuple(unverified))


def _find(results: Results, request: Request, record: RequestRecord) -> Verification | None:
    output = record.output_token_ids
    if output is None:
        return Verification("", error="the server sent no token ids")
    return results.verifications.get(pair_key(request.prompt_token_ids, output))


def _wrong_tokens(where: str, verification: Verification, tolerance: Tolerance) -> list[str]:
    if not verification.num_violations:
        return []
    index = verification.first_violation
    return [
        f"{where}: token {index} is not what the reference would emit (gap up to "
        f"{verification.max_gap:.3g} logits, {tolerance.epsilon:g} allowed), "
        f"{verification.num_violations} such tokens"
    ]


def wrong_first_tokens(results: Results, instance: str) -> list[str]:
    """Name the launches of an instance whose first token is not the reference's."""
    tolerance = TOLERANCES[results.suite.instance(instance).dtype]
    prompt = launch_prompt(results, results.suite.instance(instance).model)
    found: list[str] = []
    for launch in results.launches:
        verification = results.verifications.get(pair_key(prompt, launch.first_output))
        if launch.instance == instance and verification is not None:
            where = f"launch {launch.launch} attempt {launch.attempt}"
            found += _wrong_tokens(where, verification, tolerance)
    return found


def _generated_differences(results: Results, case: Case) -> list[str]:
    """Compare with the reference's own `generate`, where it was asked.

    A divergence at a token whose gap is within ε is a tie: either side may take it.
    """
    found = []
    generated = {g.prompt_key: g.output for g in results.generated}
    for launch, run in sorted(results.runs_of(case).items()):
        for request, record in zip(requests_of(results, run), run.records, strict=True):
            expected = generated.get(pair_key(request.prompt_token_ids, ()))
            output = record.output_token_ids
            if expected is None or output is None or not record.completed:
                continue
            at = first_difference(output, expected)
            verification = _find(results, request, record)
            ties = {index for index, *_ in verification.nonargmax} if verification else set()
            if at is not None and at not in ties:
                found.append(
                    f"launch {launch} request {record.index}: differs from the reference's "
                    f"generate at token {at}"
                )
    return found


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first index at which two outputs differ within the shorter one, or None."""
    for index, (got, want) in enumerate(zip(output, expected, strict=False)):
        if got != want:
            return index
    return None
