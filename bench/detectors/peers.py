"""How other projects decide what is slower: each published rule, simplified, as a pure function.

A rule takes (past, tonight, layout) and returns +1 for each cell that it calls slower, −1 for each
that it calls faster, [case, metric]. They see log badness, so that worse is up for every metric,
and "5 % worse" means to each what it means to its project: see `_beyond`. No rule knows of failed
requests, drivers or prompts, and none is asked about them. Tools that install here run as they are:
see `real_tools`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from detectors.detector import NightOutcome
from detectors.episodes import PAST_LAUNCHES, Past, episode
from detectors.injections import Injection
from detectors.layout import GATED, HIGHER_IS_BETTER, TAIL, Array, Conditions, Layout, Mask

# +1 slower, -1 faster, 0 neither: [case, metric].
Signs = np.ndarray[Any, np.dtype[np.int_]]
Rule = Callable[[Past, Array, Layout], Signs]


@dataclass(frozen=True, slots=True)
class Peer:
    """A rule, the launches of tonight that it takes, and the metrics that it looks at.

    `launches` is the most; `used` counts those of a night for a rule that may do with fewer.
    """

    name: str
    rule: Rule
    launches: int = 1
    metrics: tuple[str, ...] = GATED
    used: Callable[[Past, Array, Layout], float] | None = None
    sensitivity: str | None = None
    family: str = "rules"
    most: int | None = None

    def run(
        self, conditions: Conditions, injection: Injection, seed: int, num_nights: int
    ) -> list[NightOutcome]:
        """Judge episodes; see `Detector.run`."""
        layout = conditions.layout
        watched = layout.mask(self.metrics)
        outcomes = []
        for number in range(num_nights):
            drawn = episode(conditions, injection, seed, number, self.launches)
            for night, (past, tonight) in enumerate(drawn):
                signs = np.where(watched, self.rule(past, tonight, layout), 0)
                used = self.used(past, tonight, layout) if self.used else float(self.launches)
                outcomes.append(outcome(number, night, signs, layout, used))
        return outcomes


def outcome(number: int, night: int, signs: Signs, layout: Layout, launches: float) -> NightOutcome:
    """Return what a rule's signs amount to."""
    gated = layout.mask(layout.gated)
    counts = {"REGRESSION": signs > 0, "IMPROVEMENT": signs < 0, "PASS": signs == 0}
    verdicts = {name: int((mask & gated).sum()) for name, mask in counts.items()}
    return NightOutcome(
        number,
        night,
        layout.names(signs > 0),
        launches,
        layout.names(signs < 0),
        {name: count for name, count in verdicts.items() if count},
    )


def _beyond(layout: Layout, share: float) -> Array:
    """Return by how much log badness exceeds a limit of `share`, by metric.

    A throughput that is lower by 5 % is worse by −log(0.95), a latency longer by 5 % by log(1.05).
    """
    higher = np.array([name in HIGHER_IS_BETTER for name in layout.metrics])
    limits: Array = np.where(higher, -np.log1p(-share), np.log1p(share))
    return limits


def _signs(slower: Mask, faster: Mask | None = None) -> Signs:
    signs: Signs = slower.astype(int)
    return signs if faster is None else signs - faster


@dataclass(frozen=True, slots=True)
class Fixed:
    """One launch against one that was stored once: the simplest gate, and the most common.

    IREE's golden times (+10 %) and vLLM-omni's baseline in the configuration (10 %) are of this
    kind. Simplified: no absolute pads, and nobody stores a new one.
    """

    share: float

    def __call__(self, past: Past, tonight: Array, layout: Layout) -> Signs:
        """Judge tonight's one run."""
        worse = tonight[0] - past.anchor[0]
        return _signs(worse > _beyond(layout, self.share))


@dataclass(frozen=True, slots=True)
class TensorRtLlm:
    """TensorRT-LLM's perf sanity tests (README_perf_regression_system.md in its repository).

    90 days of results, averaged within each day, then over the trailing three days; of that the
    95th percentile for what is better when higher, the 5th for the rest, so the best of it. Worse
    than that by 5 % after a merge (a warning there), by 10 % before one (a failure). Simplified:
    one run a day; without the thresholds that a record may carry, and without the exemption of a
    change whose branch had regressed before.
    """

    share: float
    days: int = 90
    trailing: int = 3

    def __call__(self, past: Past, tonight: Array, layout: Layout) -> Signs:
        """Judge tonight's one run."""
        daily = past.first_launches[-self.days :]
        sums = np.cumsum(np.concatenate([np.zeros_like(daily[:1]), daily]), axis=0)
        smooth = (sums[self.trailing :] - sums[: -self.trailing]) / self.trailing
        baseline = np.percentile(smooth, 5, axis=0)
        return _signs(tonight[0] - baseline > _beyond(layout, self.share))


@dataclass(frozen=True, slots=True)
class SgLang:
    """SGLang's serving benchmarks in CI: one constant per test and metric, and a second try.

    An assertion on output throughput or a median latency against a number in the test's file; a
    test that fails is run once more (`SGLANG_TEST_MAX_RETRY`), from a new server. Where the numbers
    come from is not written down. Simplified: 5 % worse than the median of the first ten nights,
    and never loosened; each case is one test.
    """

    share: float = 0.05
    nights: int = 10

    def __call__(self, past: Past, tonight: Array, layout: Layout) -> Signs:
        """Judge each case by its second try, where the first failed."""
        fails = self._fails(past, tonight, layout)
        again = fails[0][:, layout.mask(GATED)[0]].any(axis=1)
        return _signs(fails[1] & again[:, None])

    def used(self, past: Past, tonight: Array, layout: Layout) -> float:
        """Count launches: the first, and as much of a second as cases asked for it."""
        fails = self._fails(past, tonight, layout)
        return 1.0 + float(fails[0][:, layout.mask(GATED)[0]].any(axis=1).mean())

    def _fails(self, past: Past, tonight: Array, layout: Layout) -> Mask:
        constant = np.median(past.first_launches[: self.nights], axis=0)
        fails: Mask = tonight[:2] - constant > _beyond(layout, self.share)
        return fails


@dataclass(frozen=True, slots=True)
class Conbench:
    """Conbench's lookback z-score (docs/pages/lookback_zscore.md in its repository).

    The best of a night's launches, less the mean of up to 100 nights before it, over the standard
    deviation of their residuals from the rolling mean; beyond 5 either way. Nights that jump away
    and back at once, both by more than 5 standard deviations of the ordinary jumps (those between
    their 5th and 95th percentile), are left out. Simplified: those ordinary jumps are of the whole
    window, and nobody marks a change of the distribution by hand.
    """

    threshold: float = 5.0
    nights: int = 100

    def __call__(self, past: Past, tonight: Array, layout: Layout) -> Signs:
        """Judge the best of tonight's launches."""
        best = past.nights.min(axis=1)[-self.nights :]
        kept = ~self._outliers(best)
        counts = np.cumsum(kept, axis=0)
        sums = np.cumsum(np.where(kept, best, 0.0), axis=0)
        # Each night against the mean of those before it; the first has none and is its own.
        with np.errstate(invalid="ignore", divide="ignore"):
            before = np.concatenate([best[:1], sums[:-1] / counts[:-1]])
        usable = kept & np.isfinite(before)
        residual = np.where(usable, best - before, 0.0)
        num = usable.sum(axis=0)
        mean = residual.sum(axis=0) / num
        spread = np.sqrt((np.where(usable, residual - mean, 0.0) ** 2).sum(axis=0) / (num - 1))
        z = (tonight[:PAST_LAUNCHES].min(axis=0) - sums[-1] / counts[-1]) / spread
        return _signs(z > self.threshold, z < -self.threshold)

    def _outliers(self, best: Array) -> Mask:
        jumps = np.diff(best, axis=0)
        low, high = np.quantile(jumps, (0.05, 0.95), axis=0)
        ordinary = np.where((jumps >= low) & (jumps <= high), jumps, np.nan)
        mean, spread = np.nanmean(ordinary, axis=0), np.nanstd(ordinary, axis=0, ddof=1)
        far = np.abs(jumps - mean) > self.threshold * spread
        none = np.zeros_like(best[:1], bool)
        return np.concatenate([none, far[:-1] & far[1:], none])


@dataclass(frozen=True, slots=True)
class Benchstat:
    """benchstat (golang.org/x/perf): Mann-Whitney U of tonight's launches against a stored night's.

    Two-sided, at 0.05, the samples of two files; a difference is shown whatever its size. Each
    file's samples are one night's, as they are when `go test -count` wrote them.
    """

    alpha: float = 0.05

    def __call__(self, past: Past, tonight: Array, layout: Layout) -> Signs:
        """Judge tonight's launches against the anchor's."""
        p = stats.mannwhitneyu(tonight, past.anchor, axis=0, method="exact").pvalue
        shift = np.median(tonight, axis=0) - np.median(past.anchor, axis=0)
        differs = p < self.alpha
        return _signs(differs & (shift > 0), differs & (shift < 0))


@dataclass(frozen=True, slots=True)
class RustcPerf:
    """rustc-perf (site/src/comparison.rs in its repository): a fence from past changes.

    The relative change from the night before counts if it is at least as large as the third
    quartile plus three interquartile ranges of the last 30 such changes, signs apart. Simplified:
    every night is a commit, and nothing is weighed by size or summed over benchmarks.
    """

    deltas: int = 30

    def __call__(self, past: Past, tonight: Array, layout: Layout) -> Signs:
        """Judge the step from last night to tonight."""
        first = past.first_launches
        steps = np.abs(np.expm1(np.diff(first[-self.deltas - 1 :], axis=0)))
        low, high = np.percentile(steps, (25, 75), axis=0)
        step = np.expm1(tonight[0] - first[-1])
        fence = high + 3 * (high - low)
        return _signs(step >= fence, step <= -fence)


_SGLANG = SgLang()
_LIST = (
    Peer("tensorrt_llm_post_merge", TensorRtLlm(0.05)),
    Peer("tensorrt_llm_pre_merge", TensorRtLlm(0.10)),
    Peer("sglang_constant", _SGLANG, launches=2, used=_SGLANG.used),
    Peer("conbench_z5", Conbench(), launches=PAST_LAUNCHES),
    Peer("benchstat_u05", Benchstat(), launches=10),
    Peer("rustc_perf_iqr", RustcPerf()),
    Peer("fixed_5pct", Fixed(0.05)),
    Peer("fixed_10pct", Fixed(0.10)),
    Peer("fixed_10pct_and_p99", Fixed(0.10), metrics=(*GATED, TAIL)),
)
PEERS = {peer.name: peer for peer in _LIST}
