"""A suite without some of its engines, and without what was said of those alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from headway.suite.shape import Limit, ReferenceGate, Suite
from headway.tables import SuiteError


def without(suite: Suite, left_out: Mapping[str, str]) -> Suite:
    """Leave engines out, each for a reason; raises SuiteError where none is left.

    A limit on one of them, or that compares with one, goes with it, and so does a reference gate
    that has no candidate any more.
    """
    if not left_out:
        return suite
    kept = tuple(i for i in suite.instances if i.name not in left_out)
    if not kept:
        name, why = next(iter(left_out.items()))
        message = f"each of its engines is optional, and none can be had here: {name}: {why}"
        raise SuiteError(f"{suite.path}: {message}")
    names = {instance.name for instance in kept}
    gate = suite.reference
    return replace(
        suite,
        instances=kept,
        limits=tuple(limit for limit in suite.limits if _holds(limit, names)),
        reference=None if gate is None else _reference(gate, names),
        left_out=dict(left_out),
    )


def _holds(limit: Limit, names: Collection[str]) -> bool:
    """Whether a limit still bounds something: `*` compares with another engine, if there is one."""
    if limit.engine is not None and limit.engine not in names:
        return False
    return len(names) > 1 if limit.over == "*" else limit.over is None or limit.over in names


def _reference(gate: ReferenceGate, names: Collection[str]) -> ReferenceGate | None:
    candidates = tuple(name for name in gate.candidates if name in names)
    return replace(gate, candidates=candidates) if candidates else None
