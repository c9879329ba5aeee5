"""What a gate can say: verdicts, the words for them, findings, and what they amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headway.core import Case

# Worst first. SKIPPED is of what cannot be judged by its nature: neither good nor bad, nor awaited.
Verdict = Literal[
    "WRONG",
    "REGRESSION",
    "LIMIT",
    "MISSING",
    "INCOMPATIBLE",
    "INVALID",
    "INCONCLUSIVE",
    "MUTED",
    "RECORDING",
    "IMPROVEMENT",
    "PASS",
    "SKIPPED",
]
ORDER: tuple[Verdict, ...] = get_args(Verdict)
# What a person reads.
WORDS: dict[Verdict, str] = {
    "WRONG": "WRONG OUTPUT",
    "REGRESSION": "SLOWER",
    "LIMIT": "SLOWER",
    "MISSING": "CAN'T COMPARE",
    "INCOMPATIBLE": "CAN'T COMPARE",
    "INVALID": "CAN'T TELL",
    "INCONCLUSIVE": "CAN'T TELL YET",
    "MUTED": "CAN'T TELL YET",
    "RECORDING": "CAN'T TELL YET",
    "IMPROVEMENT": "FASTER",
    "PASS": "OK",
    "SKIPPED": "NOT JUDGED",
}
# What a person reads of a PASS on which no gate is set; and all words, worst first.
WATCHED = "watched"
ALL_WORDS = (*dict.fromkeys(WORDS[name] for name in ORDER), WATCHED)
FAILS: frozenset[Verdict] = frozenset(
    ("WRONG", "REGRESSION", "LIMIT", "MISSING", "INCOMPATIBLE", "INVALID")
)
WAITS: frozenset[Verdict] = frozenset(("INCONCLUSIVE", "MUTED", "RECORDING"))
# What a gate says of a change, whichever it is; and the gates whose PASS holds something.
DECIDED: frozenset[Verdict] = frozenset(("REGRESSION", "IMPROVEMENT", "PASS"))
HOLDS = ("limit", "baseline", "reference")
EQUALITY = "greedy_equality"
Gate = Literal["correctness", "complete", "limit", "baseline", "reference", "watch"]
Interval = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one gate says of one cell.

    `value` is the median over launches, in the metric's unit. `worse_by` is the relative change
    against what it was compared with, positive when worse; `bound` is what it, or for a limit the
    value, may reach; `visible` is the smallest change this gate could have seen; `interval` holds
    the change's confidence bounds, None in it for a side without one. None where it does not apply.
    `due` says that a cell that still records was armed before.
    `explanation` is what a person needs beside the reason, one line each. `suspected` says that
    the baseline gate waits for more nights to believe a slowdown. `was` is the verdict before
    people's decisions, where they changed it.
    """

    case: Case
    metric: str
    gate: Gate
    verdict: Verdict
    reason: str
    value: float | None = None
    unit: str = ""
    samples: tuple[float, ...] = ()
    worse_by: float | None = None
    bound: float | None = None
    visible: float | None = None
    changed: tuple[str, ...] = ()
    interval: Interval | None = None
    due: bool = False
    explanation: tuple[str, ...] = ()
    suspected: bool = False
    was: Verdict | None = None

    @property
    def message(self) -> str:
        """The finding in one line, the verdict first."""
        return f"{self.verdict} {self.case.name} {self.metric}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell with everything its gates said, worst first."""

    case: Case
    metric: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst finding's; what the reference decided stands where the baseline cannot tell.

        PASS where something held and a baseline is still to come.
        """
        paired = any(f.gate == "reference" and f.verdict in DECIDED for f in self.findings)
        untold = ("RECORDING", "INVALID") if paired else ()
        counted = [f for f in self.findings if f.gate != "baseline" or f.verdict not in untold]
        held = any(f.verdict == "PASS" and f.gate in HOLDS for f in self.findings)
        worst = counted[0].verdict
        return "PASS" if worst == "RECORDING" and held else worst

    @property
    def due(self) -> bool:
        """Whether this cell should be able to tell by now, and cannot: a strict night fails it.

        A gate that is armed and cannot see, or that was armed before; not one that still records
        within its time, nor one that somebody muted.
        """
        worst = self.findings[0]
        return self.verdict == "INCONCLUSIVE" or (self.verdict in WAITS and worst.due)

    def fails(self, strict: bool) -> bool:
        """Whether this cell fails its test."""
        return self.verdict in FAILS or (strict and self.due)

    @property
    def word(self) -> str:
        """What a person reads: a cell without a gate held nothing, so it is not OK."""
        watched = all(f.gate == "watch" for f in self.findings)
        return WATCHED if watched and self.verdict == "PASS" else WORDS[self.verdict]

    @property
    def value(self) -> float | None:
        """The median over launches; None where the cell could not be judged."""
        return next((f.value for f in self.findings if f.value is not None), None)


def worst(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort findings, worst first."""
    return tuple(sorted(findings, key=lambda f: ORDER.index(f.verdict)))


def shown(value: float | None, unit: str) -> str:
    """Write a value for a person: milliseconds, MiB, percent."""
    if value is None:
        return "—"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "1":
        return f"{value:.1%}"
    return f"{value:.3g} {unit}" if unit == "J/token" else f"{value:,.1f} {unit}"


def exit_code(outcomes: Sequence[tuple[Verdict, bool]], strict: bool = False) -> int:
    """Return 0 good, 1 slower or wrong, 3 cannot tell; nothing judged is 3.

    Each outcome is a verdict and whether it is due: see `Judged.due`.
    """
    failing = {v for v, due in outcomes if v in FAILS or (strict and due)}
    if failing - {"INVALID", *WAITS}:
        return 1
    judged = any(v != "SKIPPED" for v, _ in outcomes)
    return 3 if failing or not judged else 0
