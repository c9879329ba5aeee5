"""Was the machine what it is otherwise? Seconds of fixed kernels, and when they moved.

The kernels (headway.engines.calibration) do the same work every time, whatever engine is measured.
A kernel that takes longer around a Run than it does otherwise says that the machine was another
one while it ran. Only kernels are compared here, each with itself; no metric is ever looked at.

Seconds are positive and finite; whoever reads them from a process has checked that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway import stats

# A median and its spread need some readings; nights are few, and each is a median already.
MIN_READINGS, MIN_NIGHTS = 8, 3
# A band is at least this wide: what the machine does below it, interleaved pairs cancel.
MIN_WIDTH = 0.03
MADS = 4
# A night's readings are judged by the latest of them, so that a machine that changed for good is
# "otherwise" again after half as many; that tonight differs from other nights, `shifted` says.
RECENT = 32
NAMES = {
    "matmul": "matrix product",
    "copy": "memory copy",
    "launch": "launch loop",
    "python": "Python loop",
}


@dataclass(frozen=True, slots=True)
class Band:
    """What a kernel takes otherwise: the median of `n` readings, and how far it strays from it."""

    median: float
    low: float
    high: float
    n: int

    @property
    def width(self) -> float:
        """Half the band's width, as a share of the median."""
        return self.high / self.median - 1

    def change(self, seconds: float) -> float:
        """Return by what share of the median a reading is slower (faster: negative)."""
        return seconds / self.median - 1

    def holds(self, seconds: float) -> bool:
        """Whether a reading lies within the band."""
        return self.low <= seconds <= self.high


def bands(readings: Sequence[Mapping[str, float]]) -> Mapping[str, Band]:
    """Return each kernel's band: median ± max(4 MAD, 3 %) of its latest `RECENT` readings.

    A kernel with fewer than `MIN_READINGS` has none.
    """
    return _bands(readings[-RECENT:], MIN_READINGS)


def _bands(readings: Sequence[Mapping[str, float]], least: int) -> dict[str, Band]:
    kernels = dict.fromkeys(kernel for reading in readings for kernel in reading)
    found = {}
    for kernel in kernels:
        values = [reading[kernel] for reading in readings if kernel in reading]
        if len(values) >= least:
            found[kernel] = _band(values)
    return found


def _band(values: Sequence[float]) -> Band:
    middle = stats.median(values)
    assert middle is not None
    mad = stats.median([abs(value - middle) for value in values])
    assert mad is not None
    reach = max(MADS * mad, MIN_WIDTH * middle)
    return Band(middle, middle - reach, middle + reach, len(values))


def during(around: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return what each kernel took around a Run: the geometric mean of before and after.

    Only of kernels that were read both times; empty where nothing was read.
    """
    first, *others = around or ({},)
    return {
        kernel: math.exp(math.fsum(math.log(reading[kernel]) for reading in around) / len(around))
        for kernel in first
        if all(kernel in reading for reading in others)
    }


def moved(around: Sequence[Mapping[str, float]], known: Mapping[str, Band]) -> tuple[str, ...]:
    """Return one sentence per kernel that was outside its own band before a Run and after it.

    One reading is a quarter of a second, a Run many: what moves one of the two is over, or has just
    begun. The mean of both refused a fifth of hf_static's Runs on a quiet machine of two cores.
    """
    return tuple(
        f"the machine was not as it was: {said} its own median, {_width(known[kernel])}"
        for kernel, said in _outside(_least_moved(around, known), known)
    )


def _least_moved(
    around: Sequence[Mapping[str, float]], known: Mapping[str, Band]
) -> Mapping[str, float]:
    """Return of each kernel the reading nearest to its median; the median if they lie around it."""
    found = {}
    for kernel, band in known.items():
        values = [reading[kernel] for reading in around if kernel in reading]
        if values and len(values) == len(around):
            low, high = min(values), max(values)
            found[kernel] = min(max(band.median, low), high)
    return found


def night_medians(readings: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Return each kernel's median over a whole night; empty for too few readings."""
    return {kernel: band.median for kernel, band in _bands(readings, MIN_READINGS).items()}


def shifted(tonight: Mapping[str, float], stored: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Return one sentence per kernel whose median tonight is outside the band of stored nights.

    A kernel with fewer than `MIN_NIGHTS` stored nights says nothing.
    """
    known = _bands(stored, MIN_NIGHTS)
    return tuple(
        "tonight's machine is not that of the stored nights: "
        f"{said} its median of {known[kernel].n} nights, {_width(known[kernel])}"
        for kernel, said in _outside(tonight, known)
    )


def _outside(seconds: Mapping[str, float], known: Mapping[str, Band]) -> Iterator[tuple[str, str]]:
    for kernel, value in seconds.items():
        if kernel in known and not known[kernel].holds(value):
            change = known[kernel].change(value)
            word = "slower" if change > 0 else "faster"
            yield kernel, f"{NAMES.get(kernel, kernel)} {100 * abs(change):.1f} % {word} than"


def _width(band: Band) -> str:
    return f"band ±{100 * band.width:.1f} %"
