"""The TOML that says what a night runs on, checked whole before anything starts."""

from headway.suite.instances import DTYPES
from headway.suite.leaving import without
from headway.suite.loads import ONE_LEVEL, level_names
from headway.suite.prompting import PROMPT_KINDS
from headway.suite.reading import load
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
    "ONE_LEVEL",
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
    "level_names",
    "load",
    "without",
]
