"""A pytest plugin, `-p engines.measure_only`: of a night's tests, only those that measure run.

The readers still say which cases are measured. Without them nothing is verified or judged, which
takes the reference as long as measuring does where answers are many.
"""

from __future__ import annotations

import pytest

MEASURING = "test_measure"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Drop what does not measure, once the night has begun."""
    kept = [item for item in session.items if item.name.partition("[")[0] == MEASURING]
    dropped = [item for item in session.items if item not in kept]
    if dropped:
        session.config.hook.pytest_deselected(items=dropped)
        session.items[:] = kept
