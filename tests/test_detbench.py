"""A minute of DETBENCH: the shipped night on simulated machines, with fixed seeds.

Whole figures are `make bench-detectors`'s; what is wrong in here is wrong by far.
"""

from __future__ import annotations

import pytest
from detectors import work
from detectors.injections import INJECTIONS
from detectors.scores import Tally

pytestmark = pytest.mark.slow


def tally(detector: str, injection: str, nights: int, preset: str = "shared") -> Tally:
    """Run some episodes of one injection, the same ones every time."""
    done = work.do(work.Job((detector,), preset, (injection,), 7, 0, nights))
    assert not done.missing
    return done.tallies[detector, preset, injection]


@pytest.mark.parametrize(
    ("detector", "nights"),
    [("headway_reference 5%", 40), ("headway_reference 1.5%", 20), ("headway_baseline", 8)],
)
def test_equal_engines_raise_no_alarm(detector: str, nights: int) -> None:
    quiet = tally(detector, "none", nights)
    assert (quiet.nights, quiet.alarms) == (nights, 0)


@pytest.mark.parametrize(
    ("detector", "injection", "nights", "least"),
    [
        ("headway_reference 5%", "5%", 8, 7),
        ("headway_reference 5%", "10%", 6, 6),
        ("headway_reference 1.5%", "2%", 6, 5),
        ("headway_reference 1.5%", "one_level", 4, 3),
        ("headway_reference 5%", "improvement", 6, 5),
        ("headway_baseline", "10%", 6, 3),
    ],
)
def test_a_change_is_found_the_same_night_and_called_what_it_is(
    detector: str, injection: str, nights: int, least: int
) -> None:
    changed = tally(detector, injection, nights)
    assert changed.found >= least
    # An improvement is right without an alarm; of a slowdown only what it touches is blamed.
    if INJECTIONS[injection].expected == "faster":
        assert changed.alarms == 0
    else:
        assert changed.named == pytest.approx(changed.alarmed_first)


@pytest.mark.parametrize("injection", ["bad_night", "driver_slower", "workload"])
@pytest.mark.parametrize("detector", ["headway_reference 5%", "headway_baseline"])
def test_what_is_not_the_engines_doing_is_not_blamed_on_it(detector: str, injection: str) -> None:
    told = tally(detector, injection, 3)
    assert (told.alarms, told.right) == (0, 3)


def test_a_hostile_machine_makes_it_say_that_it_cannot_tell() -> None:
    hostile = tally("headway_reference 5%", "none", 10, "hostile")
    assert hostile.alarms == 0
    assert {"INCONCLUSIVE", "INVALID"} & set(hostile.verdicts)
