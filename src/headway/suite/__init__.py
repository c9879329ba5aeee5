"""The TOML that says what a night runs on, checked whole before anything starts."""

from headway.suite.reading import DTYPES, PROMPT_KINDS, load
from headway.suite.shape import (
    ALWAYS,
    GATED,
    SENSITIVITIES,
    BaselineGate,
    Budget,
    Instance,
    Limit,
    ReferenceGate,
    Sensitivity,
    Suite,
    Workload,
)
from headway.tables import SuiteError, find

__all__ = [
    "ALWAYS",
    "DTYPES",
    "GATED",
    "PROMPT_KINDS",
    "SENSITIVITIES",
    "BaselineGate",
    "Budget",
    "Instance",
    "Limit",
    "ReferenceGate",
    "Sensitivity",
    "Suite",
    "SuiteError",
    "Workload",
    "find",
    "load",
]
