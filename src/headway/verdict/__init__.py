"""Samples and gates → findings. Pure: judging a night again gives the same findings.

Each gate on a cell gives one Finding; a cell's verdict is its worst finding, with one exception:
a limit that was compared and held outweighs a baseline that is not there yet.
"""

from headway.verdict.finding import (
    ALL_WORDS,
    EQUALITY,
    FAILS,
    ORDER,
    WAITS,
    WATCHED,
    WORDS,
    Finding,
    Gate,
    Interval,
    Judged,
    Verdict,
    exit_code,
    shown,
    worst,
)
from headway.verdict.judging import applicable, judge, judge_cell, judge_equality
from headway.verdict.memory import Load, Memory, day_of, recall
from headway.verdict.record import MUST_HOLD, record_of
from headway.verdict.stored import against
from headway.verdict.subject import identity_of, treatment_of

__all__ = [
    "ALL_WORDS",
    "EQUALITY",
    "FAILS",
    "MUST_HOLD",
    "ORDER",
    "WAITS",
    "WATCHED",
    "WORDS",
    "Finding",
    "Gate",
    "Interval",
    "Judged",
    "Load",
    "Memory",
    "Verdict",
    "against",
    "applicable",
    "day_of",
    "exit_code",
    "identity_of",
    "judge",
    "judge_cell",
    "judge_equality",
    "recall",
    "record_of",
    "shown",
    "treatment_of",
    "worst",
]
