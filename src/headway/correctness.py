"""Are the outputs of the timed requests right? Token by token, against the reference's logits.

For an output y after a prompt p, the reference gives logits z_t in one teacher-forced pass over
p‖y, and gap_t = max z_t − z_t[y_t]. An engine whose logits are within η of the reference's (up to
a common shift) emits only tokens with gap ≤ 2η, so ε = 2η is the tolerance, per dtype. It does not
matter where an output leaves the reference's own greedy text: each prefix is the engine's own.
Some engines go on past an answer's end by never emitting it; of them the reference's choice is the
best of the ids that were left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headway import questions
from headway.answers import Ids, Pair, TextPair, answer, first_answer, key_of
from headway.core import Case, LaunchRecord, Request, RequestRecord, Run, Verification
from headway.engines.servers import launcher_of
from headway.results import Generated, Results
from headway.workload import following


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Per dtype of the engine: the largest gap, in logits, and the share of tokens with any gap.

    Sources: rounding of bf16 and fp16 logits between 16 and 32 (0.125 and 0.0156), what vLLM's and
    SGLang's own suites allow. In fp32 the same noise is near 1e-6, so every token must be the
    reference's choice; there epsilon only says what is a tie within the reference itself.
    """

    epsilon: float
    max_nonargmax: float

    @property
    def max_gap(self) -> float:
        """The largest gap that a token may have: 0 where no other token may be chosen."""
        return self.epsilon if self.max_nonargmax else 0.0

    def allows(self, verification: Verification) -> bool:
        """Whether each token of a verified output may stand, by itself."""
        found = verification.error is None and verification.differs_at is None
        return found and verification.max_gap <= self.max_gap


TOLERANCES = {
    "float32": Tolerance(1e-3, 0.0),
    "float16": Tolerance(0.10, 0.01),
    "bfloat16": Tolerance(0.25, 0.02),
}
# Text is judged by tokens within the widest; each instance's own is applied to them later.
WIDEST = max(one.epsilon for one in TOLERANCES.values())


@dataclass(frozen=True, slots=True)
class Equality:
    """What verification says of one case; `right` counts outputs without a wrong token.

    Of those, `by_text` came as text and were judged by tokens that were found to spell it. `unpaid`
    counts what is unverified because no budget was left to measure it, `lost` what is because the
    machine kept its launch from starting.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_nonargmax: int = 0
    right: int = 0
    by_text: int = 0
    wrong: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    unpaid: int = 0
    lost: int = 0


def tolerance_of(results: Results, instance: str) -> Tolerance:
    """Return what an instance's own dtype allows."""
    return TOLERANCES[results.suite.instance(instance).dtype]


def why_unverified(results: Results, case: Case) -> str | None:
    """Say why a case's outputs are not verified; None where they are.

    A sampled token is right at any rank: only its distribution could be, which takes other means.
    """
    prompts = results.suite.workload(case.workload).prompts
    if prompts.bodies is not None:
        return "prompts are a user's own requests: which tokens they became is not known"
    if prompts.send == "chat":
        return "the server's own chat template is around the prompts: its tokens are not known"
    if prompts.greedy:
        return None
    how = f"temperature {prompts.temperature:g}, top_p {prompts.top_p:g}"
    return f"outputs are sampled ({how}): none was verified, only greedy ones can be"


def pairs(results: Results, model: str) -> Iterator[Pair | TextPair]:
    """Yield every answer of a model's instances once: launches' first tokens, then Runs'."""
    seen: set[str] = set()
    for one in _answers(results, model):
        if not isinstance(one, str) and one.key not in seen:
            seen.add(one.key)
            yield one


def _answers(results: Results, model: str) -> Iterator[Pair | TextPair | str]:
    for launch in results.launches:
        if results.suite.instance(launch.instance).model_name == model:
            banned = banned_ids(results, launch.instance, launch)
            yield first_answer(questions.launch_prompt_read(results, launch), launch, banned)
    for run in results.runs:
        if run.case.model == model and why_unverified(results, run.case) is None:
            banned = banned_of(results, run)
            for request, record in _completed(results, run):
                yield answer(request.prompt_token_ids, record, banned)


def banned_ids(results: Results, instance: str, launch: LaunchRecord | None) -> Ids:
    """Return the ids that a launch's engine never emits where answers are to go on past their end.

    Those that it names itself, else the model's ends; none where it emits them, or just stops.
    """
    given = results.suite.instance(instance)
    can = launch.can if launch is not None and launch.can is not None else None
    if (can or launcher_of(given.kind, given.args).can).ignore_eos != "ban":
        return ()
    named = launch.info.banned_ids if launch is not None and launch.info is not None else ()
    return named or results.models[given.model_name].eos_ids


def banned_of(results: Results, run: Run) -> Ids:
    """Return the ids that a Run's requests which ignore EOS could not get."""
    instance = run.case.instance
    return banned_ids(results, instance, results.launch_of(instance, run.launch))


def _completed(results: Results, run: Run) -> Iterator[tuple[Request, RequestRecord]]:
    """Yield the requests that were answered, with all that their conversations had said.

    Without ids where the server's count says that its text became other ones.
    """
    before: tuple[Request, RequestRecord] | None = None
    for own, record in zip(questions.requests_of(results, run), run.records, strict=False):
        request = own
        if own.turn and before is not None:
            request = following(own, before[0], before[1].events) or own
        before = request, record
        if record.completed:
            text = run.prompt_path == "text"
            other = text and record.prompt_tokens != len(request.prompt_token_ids)
            yield replace(request, prompt_token_ids=()) if other else request, record


def equality(results: Results, case: Case) -> Equality:
    """Judge every completed request of a case, over all launches that were to be measured."""
    tolerance = tolerance_of(results, case.instance)
    generated = {one.prompt_key: one for one in results.generated}
    runs = results.runs_of(case)
    missing = [n for n in results.launches_of(case) if n not in runs]
    wrong: list[str] = []
    unverified = [results.why_missing(case, launch) for launch in missing]
    records = [results.launch_of(case.instance, launch) for launch in missing]
    unpaid = sum(record is not None and record.failure_kind == "budget" for record in records)
    lost = sum(results.lost_to_the_machine(case.instance, launch) for launch in missing)
    found: list[Verification] = []
    differing: list[str] = []
    requests = 0
    for launch, run in sorted(runs.items()):
        banned = banned_of(results, run)
        for request, record in _completed(results, run):
            requests += 1
            where = f"launch {launch} request {record.index}"
            given = answer(request.prompt_token_ids, record, banned)
            verification = _verification(results, given)
            unclear = _unclear(verification, tolerance)
            if unclear is not None:
                unverified.append(f"{where}: {unclear}")
                continue
            found.append(verification)
            wrong += _wrong_token(where, verification, tolerance, given)
            expected = generated.get(_alone(given))
            differing += _difference(where, record.output_token_ids or (), expected, tolerance)
    tokens = sum(v.num_tokens for v in found)
    others = sum(v.num_nonargmax for v in found)
    right = [one for one in found if tolerance.allows(one)]
    by_text = sum(one.by == "text" for one in right)
    allowed = math.ceil(tolerance.max_nonargmax * tokens)
    if others > allowed and tolerance.max_nonargmax:
        wrong.append(f"{others} of {tokens} tokens are not the reference's, {allowed} allowed")
    wrong += differing
    doubts = (tuple(wrong), tuple(unverified), unpaid, lost)
    return Equality(requests, tokens, others, len(right), by_text, *doubts)


def _alone(given: Pair | TextPair | str) -> str:
    """Return the key by which the reference's own answer to the same prompt goes."""
    return "" if isinstance(given, str) else key_of(given.prompt, (), given.banned)


def _verification(results: Results, given: Pair | TextPair | str) -> Verification:
    """Return what the reference said of an answer; `error` where it said nothing."""
    if isinstance(given, str):
        return Verification("", error=given)
    asked = Verification(given.key, error="the reference was not asked")
    return results.verifications.get(given.key, asked)


def _unclear(verification: Verification, tolerance: Tolerance) -> str | None:
    """Say why an output is neither right nor wrong; None where it is one of them.

    Tokens that spell a text are looked for one after the other, so that where ties are allowed,
    not to have found them proves nothing.
    """
    at = verification.differs_at
    if at is None or not tolerance.max_nonargmax:
        return verification.error
    return f"from character {at} on, no tokens were found that spell its text: a tie may be why"


def _wrong_token(
    where: str,
    verification: Verification,
    tolerance: Tolerance,
    given: Pair | TextPair | str = "",
) -> list[str]:
    if tolerance.allows(verification):
        return []
    if verification.differs_at is not None:
        at = verification.differs_at
        return [f"{where}: its text is not what the reference would write from character {at} on"]
    beyond = [(i, gap) for i, gap, _ in verification.nonargmax if gap > tolerance.max_gap]
    # Of a long list the end may be missing; the largest gap never is.
    index, gap = beyond[0] if beyond else ("?", verification.max_gap)
    if isinstance(given, Pair) and index != "?" and given.output[int(index)] in given.banned:
        return [f"{where}: token {index} ends an answer that was asked to go on: it was banned"]
    allowed = f"{tolerance.max_gap:g} allowed" if tolerance.max_gap else "exact ids are asked for"
    more = f", the first of {len(beyond)} in this output" if len(beyond) > 1 else ""
    return [
        f"{where}: token {index} is not what the reference would emit "
        f"(gap {gap:.3g} logits, {allowed}){more}"
    ]


def wrong_first_tokens(results: Results, instance: str) -> list[str]:
    """Name the launches of an instance whose first token is not the reference's."""
    tolerance = tolerance_of(results, instance)
    return [
        wrong
        for where, verification in _first_tokens(results, instance)
        if _unclear(verification, tolerance) is None
        for wrong in _wrong_token(where, verification, tolerance)
    ]


def unverified_first_tokens(results: Results, instance: str) -> list[str]:
    """Name the launches of an instance whose first token nobody has verified."""
    tolerance = tolerance_of(results, instance)
    reasons = (
        (where, _unclear(verification, tolerance))
        for where, verification in _first_tokens(results, instance)
    )
    return [
        f"{where}: its first token was not verified ({reason})"
        for where, reason in reasons
        if reason is not None
    ]


def _first_tokens(results: Results, instance: str) -> Iterator[tuple[str, Verification]]:
    for launch in results.launches:
        if launch.instance == instance and launch.launch_s is not None:
            where = f"launch {launch.launch} attempt {launch.attempt}"
            banned = banned_ids(results, instance, launch)
            given = first_answer(questions.launch_prompt_read(results, launch), launch, banned)
            yield where, _verification(results, given)


def _difference(
    where: str, output: Sequence[int], expected: Generated | None, tolerance: Tolerance
) -> list[str]:
    """Compare with the reference's own `generate`, where it was asked.

    Up to where the two part their prefix is the same, so that the margin there says whether the
    reference itself was undecided: within ε either side may take either token.
    """
    at = first_difference(output, expected.output) if expected is not None else None
    if expected is None or at is None:
        return []
    margin = expected.margins[at] if at < len(expected.margins) else math.inf
    if margin <= tolerance.epsilon:
        return []
    return [f"{where}: differs from the reference's generate at token {at}"]


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first index at which two outputs differ within the shorter one, or None."""
    for index, (got, want) in enumerate(zip(output, expected, strict=False)):
        if got != want:
            return index
    return None
