"""Tonight against stored nights: what counts is how far one night lies from the next by itself.

All launches of a night share what that night does to the machine. Were they taken for independent,
every slow night would be a regression; so the night is the sample here, as its median launch.
Values are logarithms, positive = worse; for improvements negate them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.stats.summary import mean, median, student

# How probable it is that an unchanged cell passes a margin in a night: one night alone, and the
# mean of several. Simulated suites of 24 cells on a shared machine (3 launches a night, 5 to 20
# stored nights, nights that calibration sees to be bad left out, tolerance 5 %, drift budget 3 %)
# then alarm in 0.8 to 1.0 of 100 nights: cells share their nights, so that 24 of them pass twice as
# often as one does and not 24 times. 0.005 for one night makes it 1.4.
ONE_NIGHT = 0.0025
SEVERAL_NIGHTS = 0.005
# What each of tonight's launches, or each of several nights, must show of the margin: two launches
# of three that started slow, or one bad night in a mean, are no change. Without it 10 stored nights
# alarm in 2.1 of 100 nights instead of 0.9, and find 5 % within 3 nights 79 times instead of 71.
HELD = 0.75
POWER = 0.8
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Change:
    """How far tonight and the last nights lie from the stored ones, as log-ratios.

    `held` is what the best of tonight's launches shows of `change`; `before` is the change of the
    night before. `mean_change` and `mean_held` are the mean and the least of the last nights'
    changes; None until there are enough nights. A change as large as `visible` (`mean_visible`)
    passes its margin four times out of five.
    """

    change: float
    held: float
    interval: tuple[float, float]
    margin: float
    visible: float
    before: float | None
    mean_change: float | None
    mean_held: float | None
    mean_margin: float
    mean_visible: float

    @property
    def decisive(self) -> bool:
        """Whether tonight shows it alone: for nights in which calibration vouches for the machine.

        Where nothing does, a bad night looks like this: see `repeated`.
        """
        return self.change > self.margin and self.held > HELD * self.margin

    @property
    def repeated(self) -> bool:
        """Whether tonight and the night before show it, each alone.

        Without calibration 2 % of bad nights make `decisive` false alarms in 2 of 100 nights, and
        this, with `persistent`, in 0.6.
        """
        return self.decisive and self.before is not None and self.before > self.margin

    @property
    def persistent(self) -> bool:
        """Whether the last nights show it together, with none of them near the stored nights."""
        if self.mean_change is None or self.mean_held is None:
            return False
        return self.mean_change > self.mean_margin and self.mean_held > HELD * self.mean_margin


def nights(
    anchor: Sequence[Sequence[float]],
    recent: Sequence[Sequence[float]],
    *,
    tolerance: float = 0.0,
    drift_budget: float = 0.0,
    persistence: int = 3,
) -> Change:
    """Compare tonight, the last of the recent nights, with the stored ones of the anchor.

    Each night is the list of its launches. The margins are Student's prediction for one more night
    (for the mean of `persistence` more) after n stored ones, t · s · sqrt(1/m + 1/n); one is at
    least `tolerance`, the other at least `drift_budget`, both as log-ratios.
    """
    stored = [_median(night) for night in anchor]
    if len(stored) < 2 or not recent:
        raise ValueError(
            f"a change needs two stored nights or more and tonight, not {len(stored)} nights"
            f" and {len(recent)} recent ones"
        )
    n = len(stored)
    center = math.fsum(stored) / n
    sd = math.sqrt(math.fsum((x - center) ** 2 for x in stored) / (n - 1))
    scale, mean_scale = (sd * math.sqrt(1 / m + 1 / n) for m in (1, persistence))
    changes = [_median(night) - center for night in recent]
    last = changes[-persistence:] if len(changes) >= persistence else []

    def quantile(p: float) -> float:
        return student(p, n - 1)

    margin = max(tolerance, quantile(1 - ONE_NIGHT) * scale)
    mean_margin = max(drift_budget, quantile(1 - SEVERAL_NIGHTS) * mean_scale)
    reach = quantile((1 + CONFIDENCE) / 2) * scale
    return Change(
        change=changes[-1],
        held=min(recent[-1]) - center,
        interval=(changes[-1] - reach, changes[-1] + reach),
        margin=margin,
        visible=margin + quantile(POWER) * scale,
        before=changes[-2] if len(changes) > 1 else None,
        mean_change=mean(last),
        mean_held=min(last, default=None),
        mean_margin=mean_margin,
        mean_visible=mean_margin + quantile(POWER) * mean_scale,
    )


def _median(night: Sequence[float]) -> float:
    value = median(night)
    if value is None:
        raise ValueError("a night without launches cannot be compared")
    return value
