from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import codec
from headway.core import (
    Case,
    EngineInfo,
    LaunchRecord,
    RequestRecord,
    Run,
    StepTiming,
    TokenEvent,
    Verification,
)
from headway.fingerprint import Machine, Treatment
from headway.results import Generated, ModelFacts, Results, Written

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.builds(
    TokenEvent,
    at_s=NUMBERS,
    text=st.text(max_size=8),
    token_ids=st.none() | st.lists(st.integers(), max_size=4).map(tuple),
    num_tokens=st.none() | st.integers(0, 9),
    engine_at_s=st.none() | NUMBERS,
    kind=st.sampled_from(["content", "reasoning", "tool", "hidden"]),
)


def through_json(kind, value):
    text = json.dumps(codec.encode(value), allow_nan=False)
    return codec.decode(kind, json.loads(text))


@given(st.lists(EVENTS, max_size=4).map(tuple))
def test_events_survive_json(events):
    record = RequestRecord(0, 0.0, None, None, events)
    assert through_json(RequestRecord, record) == record


def test_every_part_of_a_night_survives_json(factory):
    results = factory.make_night({"a": factory.Speed(fails=1), "b": factory.Speed(stamps=False)})
    parts = [*results.runs, *results.launches, *results.steps, *results.verifications.values()]
    parts += [results.machine, *results.models.values(), Generated("k", (1, 2), (0.5, 1.0))]
    parts += [Written("m", "w", 1, ((1, 2), (3,)), ("ab", "é"), (0,))]
    kinds = {Run, LaunchRecord, StepTiming, Verification, Machine, ModelFacts, Generated, Written}
    assert {type(part) for part in parts} == kinds
    for part in parts:
        assert through_json(type(part), part) == part


def test_a_verification_with_what_is_not_the_first_choice_survives_json(factory):
    results = factory.verified(factory.make_night(), first_wrong=2)
    wrong = [v for v in results.verifications.values() if v.max_gap > 0]
    assert wrong
    assert all(through_json(Verification, v) == v for v in wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_undefined_number_is_never_written(value):
    with pytest.raises(ValueError, match="an undefined number is None"):
        codec.encode({"deep": [{"x": value}]})


GOOD = codec.encode(Case("a", "m", "w", "c1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levle": "c1"}, "value.levle is not known here; allowed: instance, model"),
        ({"level": 1}, "value.level is 1; it must be str"),
        ({"level": None}, "value.level is None; it must be str"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(change, message):
    with pytest.raises(codec.DecodeError, match=message):
        codec.decode(Case, GOOD | change)


def test_a_missing_field_is_named():
    with pytest.raises(codec.DecodeError, match=r"value\.level is missing"):
        codec.decode(Case, {k: v for k, v in GOOD.items() if k != "level"})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (int, 1.5),
        (float, "1"),
        (float, True),
        (bool, 1),
        (tuple[int, ...], [1, "2"]),
        (tuple[int, ...], [1, True]),
        (tuple[int, float, int], [1, 2.0]),
        (tuple[int, ...], {"a": 1}),
        (StepTiming, []),
    ],
)
def test_a_wrong_type_is_refused(kind, value):
    with pytest.raises(codec.DecodeError):
        codec.decode(kind, value)


def test_a_literal_outside_its_values_is_refused(factory):
    step = codec.encode(factory.make_night().steps[0]) | {"phase": "idle"}
    with pytest.raises(codec.DecodeError, match="one of 'prefill', 'decode'"):
        codec.decode(StepTiming, step)


def test_whole_numbers_are_read_as_floats_where_floats_are_meant():
    assert codec.decode(TokenEvent, {"at_s": 1}) == TokenEvent(1.0)


def test_settings_keep_what_they_hold():
    info = EngineInfo("k", "1", "m", "float32", "cpu", {"a": [1, {"b": None}]}, {"torch": "2"})
    assert through_json(EngineInfo, info) == info
    treatment = Treatment("k", "1", {"x": 0.1}, {"E": "1"})
    assert through_json(Treatment, treatment) == treatment


def test_results_has_no_part_that_this_file_forgot():
    known = {
        "night",
        "suite",
        "machine",
        "started_at",
        "finished",
        "models",
        "expected",
        "commit",
        "runs",
        "launches",
        "steps",
        "verifications",
        "generated",
        "calibrations",
        "commits",
        "written",
    }
    assert {field.name for field in dataclasses.fields(Results)} == known
