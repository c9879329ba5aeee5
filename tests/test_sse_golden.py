"""Streams of named releases say what they should, cut anywhere; broken ones raise nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import codec, sse

GOLDEN = Path(__file__).parent / "golden"
ANSWERS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "answers.json").read_text("utf-8"))
STREAMS = {path.stem: path.read_bytes() for path in sorted(GOLDEN.glob("*.sse"))}


def said(stream: sse.Stream) -> dict[str, Any]:
    """A stream in the shape of an answer: all but the stamps."""
    ids = [None if one.token_ids is None else list(one.token_ids) for one in stream.events]
    return {
        "events": [
            [one.text, one.kind, its_ids, one.num_tokens]
            for one, its_ids in zip(stream.events, ids, strict=True)
        ],
        "prompt_tokens": stream.prompt_tokens,
        "completion_tokens": stream.completion_tokens,
        "cached_prompt_tokens": stream.cached_prompt_tokens,
        "finish_reason": stream.finish_reason,
        "done": stream.done,
        "error": None if stream.error is None else [stream.error.kind, stream.error.message],
        "warnings": list(stream.warnings),
    }


def test_every_stream_has_an_answer_and_a_source():
    assert set(STREAMS) == set(ANSWERS)
    readme = (GOLDEN / "README.md").read_text("utf-8")
    for name in STREAMS:
        project, release, *_ = name.split("_")
        assert f"`{project}_{release}_" in readme, name


@pytest.mark.parametrize("name", STREAMS)
def test_a_golden_stream_says_what_it_should(name):
    assert said(sse.parse([(1.0, STREAMS[name])])) == ANSWERS[name]


@pytest.mark.parametrize("name", STREAMS)
def test_events_are_stamped_by_the_read_that_completed_them_and_nothing_else_changes(name):
    raw = STREAMS[name]
    whole = sse.parse([(1.0, raw)])
    alone = sse.parse([(float(place), raw[place : place + 1]) for place in range(len(raw))])
    assert said(alone) == ANSWERS[name]
    # The blank line completes an event: its second line end is its last byte.
    ends = [place + 1 for place in range(len(raw)) if raw[place : place + 2] == b"\n\n"]
    assert {event.at_s for event in alone.events} <= set(map(float, ends))
    assert sse.parse([(1.0, memoryview(raw)[:50]), (1.0, memoryview(raw)[50:])]) == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 10**6), max_size=20))
def test_a_golden_stream_may_be_cut_anywhere(name, places):
    raw = STREAMS[name]
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    reads = [(float(number), raw[a:b]) for number, (a, b) in enumerate(pairwise(edges))]
    stream = sse.parse(reads)
    assert said(stream) == ANSWERS[name]
    stamps = [event.at_s for event in stream.events]
    assert stamps == sorted(stamps)


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
@pytest.mark.parametrize("name", STREAMS)
def test_other_line_ends_and_a_byte_order_mark_change_nothing(name, end):
    raw = b"\xef\xbb\xbf" + STREAMS[name].replace(b"\n", end)
    assert said(sse.parse([(1.0, raw)])) == ANSWERS[name]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_cut_short_is_a_beginning_of_the_whole(name):
    """No cut invents tokens; only the texts of a snapshot dialect need a second look."""
    raw = STREAMS[name]
    whole = [event[0] for event in ANSWERS[name]["events"]]
    blank = [place + 2 for place in range(len(raw)) if raw[place : place + 2] == b"\n\n"]
    for place in blank:
        texts = [event.text for event in sse.parse([(1.0, raw[:place])]).events]
        if "incremental" not in name:
            assert texts == whole[: len(texts)]


mutations = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 30), st.binary(max_size=6)), max_size=4
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(STREAMS)), mutations)
def test_a_broken_golden_stream_raises_nothing_and_can_be_stored(name, changes):
    raw = STREAMS[name]
    for place, length, other in changes:
        place %= len(raw) + 1
        raw = raw[:place] + other + raw[place + length :]
    stream = sse.parse([(1.0, raw)])
    json.dumps(codec.encode(stream), allow_nan=False)
    assert all(event.num_tokens is None or event.num_tokens >= 0 for event in stream.events)


values = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        7,
        2**70,
        1.5,
        float("nan"),
        "",
        "x",
        "abort",
        [],
        [None],
        [1],
        {},
        {"a": 1},
    ]
)


def replaced(body: Any, number: int, value: Any) -> Any:
    """JSON with the value at one place, counted in depth first, replaced by another."""
    left = number

    def walk(one: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            return value
        if isinstance(one, dict):
            return {key: walk(item) for key, item in one.items()}
        return [walk(item) for item in one] if isinstance(one, list) else one

    return walk(body)


@settings(deadline=None, max_examples=500)
@given(st.sampled_from(sorted(STREAMS)), st.data())
def test_any_value_anywhere_in_a_golden_stream_raises_nothing(name, data):
    bodies = [piece for _, piece in sse.events([(0.0, STREAMS[name])]) if b"{" in piece]
    which = data.draw(st.integers(0, len(bodies) - 1))
    try:
        body = json.loads(bodies[which])
    except ValueError:
        return  # the error of transformers that is no JSON
    changed = replaced(body, data.draw(st.integers(0, 60)), data.draw(values))
    bodies[which] = json.dumps(changed).encode()
    stream = sse.parse([(1.0, b"".join(b"data: " + piece + b"\n\n" for piece in bodies))])
    json.dumps(codec.encode(stream), allow_nan=False)
    assert codec.decode(sse.Stream, codec.encode(stream)) == stream


@pytest.mark.parametrize("name", STREAMS)
def test_counts_of_events_never_exceed_the_servers(name):
    answer = ANSWERS[name]
    counts = [event[3] for event in answer["events"]]
    if None not in counts and answer["completion_tokens"] is not None:
        assert sum(counts) <= answer["completion_tokens"]
