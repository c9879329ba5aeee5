"""What people decided, applied to what the gates say: nothing that is wrong becomes right by it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date

from headway.decisions import Decision, Decisions
from headway.verdict.finding import FAILS, WAITS, Finding, Judged, worst

# The gates that compare, and so can have a slowdown accepted.
COMPARING = ("baseline", "reference")


def apply(judged: Judged, decisions: Decisions, today: date) -> Judged:
    """Return a cell as people decided to read it on that day.

    A muted cell's failures are MUTED, but never WRONG; a REGRESSION, or the suspicion of one, that
    is within what was accepted is a PASS. What has expired does nothing but being named.
    """
    mine = [d for d in decisions if d.covers(judged.case, judged.metric)]
    if not mine:
        return judged
    holding = [d for d in mine if d.holds(today)]
    muted = max((d for d in holding if d.kind == "mute"), key=_last, default=None)
    findings = [_accept(judged, finding, holding) for finding in judged.findings]
    if muted is not None:
        findings = [_mute(finding, muted) for finding in findings]
    expired = [d for d in mine if not d.holds(today)]
    if expired:
        findings = [_name_expired(finding, max(expired, key=_last)) for finding in findings]
    return replace(judged, findings=worst(findings))


def _last(decision: Decision) -> tuple[date, str]:
    return decision.last_day, decision.reason


def _mute(finding: Finding, decision: Decision) -> Finding:
    if finding.verdict == "WRONG" or finding.verdict not in FAILS | WAITS:
        return finding
    reason = f"muted {decision.said}; it says {finding.verdict}: {finding.reason}"
    return replace(finding, verdict="MUTED", reason=reason, was=finding.was or finding.verdict)


def _accept(judged: Judged, finding: Finding, holding: list[Decision]) -> Finding:
    if finding.gate not in COMPARING or finding.worse_by is None:
        return finding
    if finding.verdict != "REGRESSION" and not finding.suspected:
        return finding
    found = [
        (effect, decision)
        for decision in holding
        if (effect := decision.accepted(judged.case, judged.metric)) is not None
    ]
    if not found:
        return finding
    effect, decision = max(found, key=lambda pair: (pair[0], _last(pair[1])))
    beyond = math.log1p(finding.worse_by) - math.log1p(effect)
    if beyond > math.log1p(finding.bound or 0.0):
        more = f"; {effect:.1%} worse was accepted {decision.said}"
        return replace(finding, reason=finding.reason + more)
    reason = f"up to {effect:.1%} worse is accepted {decision.said}; {finding.reason}"
    return replace(
        finding, verdict="PASS", reason=reason, suspected=False, was=finding.verdict, due=False
    )


def _name_expired(finding: Finding, decision: Decision) -> Finding:
    if finding.verdict not in FAILS:
        return finding
    word = "accepted" if decision.kind == "accept" else "muted"
    line = f"it was {word} until {decision.until}, which has passed: {decision.reason}"
    return replace(finding, explanation=(*finding.explanation, line))
