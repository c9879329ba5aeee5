"""The tables of a suite that set gates: limits, baseline, reference; and the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.suite.shape import (
    ALPHA,
    GATED,
    NIGHT_MINUTES,
    SENSITIVITIES,
    BaselineGate,
    Budget,
    Instance,
    Limit,
    ReferenceGate,
)
from headway.tables import Reader

# Below it, what one machine does to itself within a month would be called a regression.
MIN_TOLERANCE = 0.05
# With fewer, no pair could be lost to the machine, and no spread between pairs be seen.
MIN_PAIRS = 4


class GateReader(Reader):
    """Reads what a suite asserts, and its budget."""

    def limit(self, index: int, table: Mapping[str, Any]) -> Limit:
        """Read one bound that a person set."""
        where = f"limit[{index}]"
        self.known(where, table, _LIMIT_KEYS)
        metric = self.get(where, table, "metric", str, None)
        if metric is None:
            raise self.fail(f"{where}.metric", "is missing")
        low = self.get(where, table, "min", float, None)
        high = self.get(where, table, "max", float, None)
        if low is None and high is None:
            raise self.fail(where, "has neither min nor max: it limits nothing")
        if low is not None and high is not None and low > high:
            raise self.fail(where, f"has min {low:g} above max {high:g}: nothing can meet it")
        if metric == "slo_attainment" and low is not None and not 0 < low < 1:
            message = f"is {low:g}; it must lie between 0 and 1: no number of requests shows all"
            raise self.fail(f"{where}.min", message)
        texts = {k: self.get(where, table, k, str, None) for k in ("engine", "over", "workload")}
        level = self.get(where, table, "level", str, None)
        return Limit(metric, level=level, min=low, max=high, **texts)

    def baseline(self, table: Mapping[str, Any]) -> BaselineGate:
        """Read when a stored baseline may speak."""
        self.known("baseline", table, _BASELINE_KEYS)
        default = BaselineGate()
        metrics = self.strings("baseline", table, "metrics", GATED)
        tolerance = self.positive("baseline", table, "tolerance", float, default.tolerance)
        if tolerance < MIN_TOLERANCE:
            message = f"is {tolerance:g}; never tighter than {MIN_TOLERANCE:g}"
            raise self.fail("baseline.tolerance", message)
        numbers = {
            key: self.positive("baseline", table, key, type(getattr(default, key)), fallback)
            for key in _BASELINE_NUMBERS
            for fallback in [getattr(default, key)]
        }
        return BaselineGate(metrics, tolerance, **numbers)

    def strings(
        self, where: str, table: Mapping[str, Any], key: str, default: Sequence[str]
    ) -> tuple[str, ...]:
        """Return a list of names, or the default."""
        names = self.get(where, table, key, list, list(default))
        if not all(isinstance(name, str) for name in names):
            raise self.fail(f"{where}.{key}", f"is {names!r}; it must be a list of names")
        return tuple(names)

    def reference(
        self, tables: Mapping[str, Any], instances: Sequence[Instance], marked: Sequence[str]
    ) -> ReferenceGate | None:
        """Read the reference gate; None where no engine is marked as the reference."""
        table = self.get("", tables, "reference", dict, {})
        self.known("reference", table, _REFERENCE_KEYS)
        if not marked:
            if table:
                raise self.fail("[reference]", "needs an engine with reference = true")
            return None
        if len(marked) > 1:
            names = ", ".join(marked)
            raise self.fail("reference", f"is true of {names}; one engine can be the reference")
        sensitivity = self.get("reference", table, "sensitivity", str, "5%")
        self.choice("reference.sensitivity", sensitivity, list(SENSITIVITIES))
        preset = SENSITIVITIES[sensitivity]
        first = self.positive("reference", table, "first_pairs", int, preset.first_pairs)
        if first < MIN_PAIRS:
            raise self.fail("reference.first_pairs", f"is {first}; at least {MIN_PAIRS}")
        most = self.positive("reference", table, "max_pairs", int, max(first, preset.max_pairs))
        if most < first:
            raise self.fail("reference.max_pairs", f"is {most}; at least first_pairs, {first}")
        alpha = self.positive("reference", table, "alpha", float, ALPHA, most=0.05)
        return ReferenceGate(
            instance=marked[0],
            candidates=self._candidates(table, instances, marked[0]),
            metrics=self.strings("reference", table, "metrics", GATED),
            sensitivity=sensitivity,
            margin=self.positive("reference", table, "margin", float, preset.margin, most=0.5),
            first_pairs=first,
            max_pairs=most,
            alpha=alpha,
            prime=self.get("reference", table, "prime", bool, False),
        )

    def _candidates(
        self, table: Mapping[str, Any], instances: Sequence[Instance], reference: str
    ) -> tuple[str, ...]:
        """Return who is compared with the reference: by default everyone with its model."""
        (model,) = [i.model_name for i in instances if i.name == reference]
        same = [i.name for i in instances if i.name != reference and i.model_name == model]
        names = self.strings("reference", table, "candidates", same)
        for name in names:
            self.choice("reference.candidates", name, same)
        if not names:
            raise self.fail("reference.candidates", f"is empty: nobody to compare {reference} with")
        return names

    def budget(self, table: Mapping[str, Any]) -> Budget:
        """Read minutes, or money at a price per hour; where both are given the smaller holds."""
        self.known("budget", table, _BUDGET_KEYS)
        price = self.positive("budget", table, "price_per_hour", float, None)
        found: dict[str, float | None] = {}
        for what in ("night", "comparison", "month"):
            default = NIGHT_MINUTES if what == "night" else None
            minutes = self.positive("budget", table, f"{what}_minutes", float, None)
            cost = self.positive("budget", table, f"{what}_cost", float, None)
            if cost is not None and price is None:
                raise self.fail(f"budget.{what}_cost", "needs budget.price_per_hour")
            paid = None if cost is None or price is None else cost / price * 60
            limits = [limit for limit in (minutes, paid) if limit is not None]
            found[f"{what}_minutes"] = min(limits) if limits else default
        night_minutes = found.pop("night_minutes")
        assert night_minutes is not None
        return Budget(night_minutes, price_per_hour=price, **found)


_LIMIT_KEYS = ("metric", "engine", "over", "workload", "level", "min", "max")
_BASELINE_NUMBERS = (
    *("resolution", "min_launches", "min_nights"),
    *("drift_budget", "persistence", "arm_within_days"),
)
_BASELINE_KEYS = ("metrics", "tolerance", *_BASELINE_NUMBERS)
_REFERENCE_KEYS = (
    *("candidates", "metrics", "sensitivity", "margin"),
    *("first_pairs", "max_pairs", "alpha", "prime"),
)
_BUDGET_KEYS = (
    *("night_minutes", "comparison_minutes", "month_minutes"),
    *("night_cost", "comparison_cost", "month_cost", "price_per_hour"),
)
