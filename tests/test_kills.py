"""tests/kills.py in short: killed at random moments, a night leaves nothing but a clear verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kills.py")


@pytest.mark.paced
@pytest.mark.slow
def test_kills_at_random_moments_leave_nothing_but_a_clear_verdict() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "fake", "6"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["trials"], said["good"]) == (6, 6)
    assert (said["processes_left"], said["ports_taken"]) == (0, 0)
    assert said["killed"].get("pytest", 0) >= 1
    assert said["engine_kills_that_are_red"] >= 1
