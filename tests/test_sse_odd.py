"""Whatever bytes arrive, and however they are cut, the parser answers and invents nothing."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway import codec, sse

DONE = b"data: [DONE]\n\n"


def event(body: object, end: bytes = b"\n") -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + end + end


def text(piece: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": piece, **more}]}


def parse(*bodies: object) -> sse.Stream:
    raw = b"".join(map(event, bodies)) + DONE
    return sse.parse([(1.0, raw)])


def cut(raw: bytes, places: Sequence[int]) -> list[tuple[float, bytes]]:
    """Split bytes at places; empty pieces and all."""
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [(1.0, raw[a:b]) for a, b in itertools.pairwise(edges)]


pieces = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
bodies = st.one_of(
    st.builds(text, pieces),
    st.builds(lambda p, ids: text(p, token_ids=ids), pieces, st.lists(st.integers(0, 99))),
    st.builds(
        lambda p, c: {"choices": [], "usage": {"prompt_tokens": p, "completion_tokens": c}},
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.builds(
        lambda p, c: {"choices": [{"delta": {"reasoning": p, "content": c}}]}, pieces, pieces
    ),
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
streams = st.lists(st.builds(event, bodies, ends), max_size=6).map(b"".join)
places = st.lists(st.integers(0, 10_000), max_size=12)


@settings(deadline=None)
@given(streams, st.sampled_from([b"", DONE, b": bye\r\n"]), places)
def test_how_bytes_are_split_changes_nothing(raw, tail, places):
    whole = raw + tail
    assert sse.parse(cut(whole, places)) == sse.parse([(1.0, whole)])


@settings(deadline=None)
@given(streams)
def test_single_bytes_say_what_the_whole_says(raw):
    alone = [(1.0, bytes([byte])) for byte in raw]
    assert sse.parse(alone) == sse.parse([(1.0, raw)])


def test_every_single_cut_of_mixed_line_ends_says_the_same():
    raw = event(text("a "), b"\r\n") + event(text("\u8a9e"), b"\r") + event(text("c")) + DONE
    whole = sse.parse([(1.0, raw)])
    assert [one.text for one in whole.events] == ["a ", "\u8a9e", "c"]
    for place in range(len(raw) + 1):
        assert sse.parse([(1.0, raw[:place]), (1.0, raw[place:])]) == whole


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.binary(max_size=60)), max_size=8))
def test_no_bytes_raise(chunks):
    sse.parse(chunks)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            [
                "choices", "delta", "content", "text", "usage", "error", "message", "token_ids",
                "completion_tokens", "prompt_tokens", "headway", "at_s", "arrived_s", "tool_calls",
                "function", "arguments", "reasoning", "finish_reason", "index", "meta_info",
                "output_ids", "cached_tokens", "token", "id", "special", "details", "stop",
                "generated_text", "tokens", "tokens_predicted", "stop_type", "timings", "cache_n",
                "predicted_n", "type", "response", "item_id", "object", "prompt_tokens_details",
            ]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(json_values, max_size=4))
def test_no_json_raises_and_what_is_understood_can_be_stored(values):
    raw = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)
    stream = sse.parse([(1.0, raw)])
    json.dumps(codec.encode(stream), allow_nan=False)


@pytest.mark.parametrize(
    "raw",
    [
        b"data: " + b"[" * 200_000 + b"\n\n",
        b'data: {"choices":' + b"[" * 200_000 + b"\n\n",
        b"data: " + b"9" * 10_000 + b"\n\n",
        b"data: \xff\xfe\n\n",
        b"data: {\n\n",
        b"data: {} {}\n\n",
    ],
    ids=["deep", "deep_choices", "huge_int", "not_utf8", "cut", "two_values"],
)
def test_what_is_not_json_is_a_malformed_event(raw):
    stream = sse.parse([(1.0, raw + DONE)])
    assert stream.error is not None
    assert stream.error.kind == "malformed_event"
    assert len(stream.error.message) < 400


@pytest.mark.parametrize("body", [[], 3, "x", None, True, 1.5])
def test_json_that_is_no_object_is_a_malformed_event(body):
    error = parse(text("a"), body).error
    assert error is not None
    assert error.kind == "malformed_event"
    assert type(body).__name__ in error.message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ({"message": "out of memory", "type": "server_error", "code": 500}, "out of memory"),
        ("out of memory", "out of memory"),
        ({"code": 500}, '{"error": {"code": 500}}'),
        ({"message": None}, '{"error": {"message": null}}'),
        (["x"], '{"error": ["x"]}'),
        ({"message": "m" * 9999}, "m" * 500),
    ],
)
def test_an_error_event_inside_a_200_is_quoted_and_keeps_what_came_before(error, message):
    stream = parse(text("a"), text("b"), {"error": error}, text("late"))
    assert stream.error == sse.StreamError("server_error", message)
    assert [one.text for one in stream.events] == ["a", "b"]


def test_half_a_surrogate_pair_in_an_error_can_be_written_to_a_file():
    stream = sse.parse([(0, b'data: {"error": {"message": "a\\ud800b"}}\n\n')])
    assert stream.error is not None
    assert stream.error.message.encode("utf-8") == b"a?b"


def test_a_null_error_is_none():
    assert parse({"error": None, **text("a")}).error is None


@pytest.mark.parametrize(
    "place", [{"choices": []}, text("b"), text("", finish_reason="stop"), {"choices": None}, {}]
)
def test_usage_counts_wherever_it_stands_and_the_last_one_holds(place):
    early = {**text("a"), "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    late = {**place, "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    stream = parse(early, late, text("c"))
    assert (stream.prompt_tokens, stream.completion_tokens) == (5, 2)


@pytest.mark.parametrize("count", [-1, True, False, 2.0, "7", [], 10**400, float("nan")])
def test_a_count_that_is_none_is_left_out_and_said(count):
    stream = parse(text("a"), {"usage": {"prompt_tokens": 3, "completion_tokens": count}})
    assert (stream.prompt_tokens, stream.completion_tokens) == (3, None)
    assert stream.warnings == ("bad_usage",)


@pytest.mark.parametrize("usage", [None, [], 3, {}, {"completion_tokens": None}])
def test_no_usage_is_no_count_and_no_warning(usage):
    stream = parse(text("a"), {"usage": usage})
    assert (stream.completion_tokens, stream.warnings) == (None, ())


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([5, 0], (5, 0)),
        ([], ()),
        (None, None),
        ([1, True], None),
        ([1, 2.0], None),
        ([-1], None),
        ([10**30], None),
        ("12", None),
    ],
)
def test_token_ids_are_whole_numbers_or_none_at_all(ids, kept):
    (one,) = parse(text("a", token_ids=ids)).events
    assert one.token_ids == kept
    assert one.num_tokens == (None if kept is None else len(kept))


def test_ids_without_text_are_a_token_event_and_no_ids_are_not():
    stream = parse(text("", token_ids=[7]), text("", token_ids=[]), text(""))
    assert [one.token_ids for one in stream.events] == [(7,)]


@pytest.mark.parametrize(
    "stamp", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "null", "[]"]
)
def test_a_stamp_that_is_no_finite_number_is_none(stamp):
    raw = (
        f'data: {{"choices":[{{"text":"a"}}],"headway":{{"at_s":{stamp},"arrived_s":{stamp}}}}}\n\n'
    )
    stream = sse.parse([(1.0, raw.encode())])
    assert stream.engine_arrived_s is None
    assert [one.engine_at_s for one in stream.events] == [None]


def test_engine_stamps_are_kept_and_the_first_arrival_holds():
    def stamped(piece: str, arrived_s: float, at_s: float) -> dict[str, object]:
        return {**text(piece), "headway": {"arrived_s": arrived_s, "at_s": at_s}}

    stream = parse(stamped("a", 0.25, 0.5), stamped("b", 0.3, 1))
    assert stream.engine_arrived_s == 0.25
    assert [one.engine_at_s for one in stream.events] == [0.5, 1.0]


def test_reasoning_and_content_of_one_delta_are_one_event_in_that_order():
    both = {"choices": [{"delta": {"content": "c", "reasoning": "r", "reasoning_content": "r"}}]}
    assert [one.text for one in parse(both).events] == ["rc"]


@pytest.mark.parametrize(
    "choices",
    [None, {}, "x", [], [None], [3], [[]], [{"delta": None}], [{"delta": {"tool_calls": [3]}}],
     [{"delta": {"tool_calls": [{"function": None}]}}], [{"delta": {"content": ["a"]}}],
     [{"text": 3, "finish_reason": 4}]],
)  # fmt: skip
def test_choices_of_another_shape_are_metadata(choices):
    stream = parse({"choices": choices})
    assert stream == replace(sse.Stream(), done=True)


def test_several_answers_in_one_stream_are_refused():
    for second in ([{"index": 1, "text": "b"}], [{"text": "a"}, {"text": "b"}]):
        stream = parse(text("a"), {"choices": second}, text("c"))
        assert stream.error is not None
        assert stream.error.kind == "several_choices"
        assert "n = 1" in stream.error.message
        assert [one.text for one in stream.events] == ["a"]


@pytest.mark.parametrize(
    "body",
    [{"index": 1, "content": "b", "stop": False}, {"index": 1, "text": "b", "meta_info": {}}],
    ids=["llama.cpp", "SGLang"],
)
def test_several_answers_in_a_native_stream_are_refused(body):
    error = parse(body).error
    assert error is not None
    assert error.kind == "several_choices"


def counted(piece: str, total: object) -> dict[str, object]:
    return {**text(piece), "usage": {"prompt_tokens": 1, "completion_tokens": total}}


@pytest.mark.parametrize(
    ("bodies", "nums"),
    [
        ([counted("a", 1), counted("b", 2), counted("cd", 5)], [1, 1, 3]),
        ([counted("", 1), counted("a", 2), counted("b", 2)], [2, 0]),
        ([text("a"), text("b"), counted("c", 9)], [None, None, None]),
        ([counted("a", 0), counted("b", 0), counted("c", 9)], [None, None, None]),
        ([counted("a", 3), counted("b", 2), counted("c", 9)], [3, None, None]),
        ([counted("a", None), counted("b", 2)], [None, None]),
        ([counted("all", 9)], [9]),
        ([{**text("a", token_ids=[1, 2])}, counted("b", 3)], [2, 1]),
        ([counted("a", 2), {**text("b", token_ids=[7])}, counted("c", 5)], [2, 1, 2]),
    ],
    ids=["running", "held", "at_the_end", "zeros", "falling", "null", "one", "after_ids", "mixed"],
)
def test_only_a_running_count_says_how_many_tokens_an_event_has(bodies, nums):
    assert [one.num_tokens for one in parse(*bodies).events] == nums


@pytest.mark.parametrize(
    ("reason", "word"),
    [("eos_token", "stop"), ("stop_sequence", "stop"), ("length", "length"), ("abort", "abort"),
     ("", None), (3, None), (None, None), ("new_reason", "new_reason")],
)  # fmt: skip
def test_finish_reasons_are_in_openais_words(reason, word):
    assert parse(text("a", finish_reason=reason)).finish_reason == word


def test_an_error_field_of_an_older_llama_cpp_is_an_error():
    body = '{"code":400,"message":"too long","type":"exceed_context_size_error"}'
    for raw in (f"error: {body}\n\n", f"error:{body}\n\n", f"error: {body}"):
        assert sse.parse([(1.0, raw.encode())]).error == sse.StreamError("server_error", "too long")


@pytest.mark.parametrize("mark", [{"object": "error"}, {"type": "error"}])
def test_an_error_without_a_wrapper_is_an_error(mark):
    stream = parse(text("a"), {**mark, "message": "no room", "code": 400})
    assert stream.error == sse.StreamError("server_error", "no room")


def test_no_ids_of_a_llama_cpp_that_was_not_asked_for_them_are_not_no_tokens():
    common = {"index": 0, "tokens": [], "stop": False}
    stream = parse(
        {**common, "content": "a", "tokens_predicted": 1},
        {**common, "content": "bc", "tokens_predicted": 3},
    )
    assert [(one.token_ids, one.num_tokens) for one in stream.events] == [(None, 1), (None, 2)]


def test_an_aborted_answer_of_sglang_says_why():
    reason = {"type": "abort", "message": "out of memory", "status_code": None}
    stream = parse({"text": "a", "meta_info": {"completion_tokens": 1, "finish_reason": reason}})
    assert stream.error == sse.StreamError("server_error", "out of memory")
    assert (stream.finish_reason, [one.text for one in stream.events]) == ("abort", ["a"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(pieces, st.integers(1, 3)), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_sglang_snapshots_say_the_same_as_deltas(parts, whole_text, whole_ids):
    said, ids, bodies, wanted = "", [], [], []
    for piece, number in parts:
        new = [len(ids) + n for n in range(number)]
        said, ids = said + piece, ids + new
        shown = {"text": said if whole_text else piece, "output_ids": ids if whole_ids else new}
        bodies.append({**shown, "meta_info": {"completion_tokens": len(ids)}})
        wanted.append((piece, tuple(new), number))
    if not whole_text:
        # Deltas that each begin with the one before would read as whole texts.
        pairs = itertools.pairwise(piece for piece, _ in parts)
        assume(not all(after.startswith(before) for before, after in pairs))
    got = [(one.text, one.token_ids, one.num_tokens) for one in parse(*bodies).events]
    assert got == wanted


def test_arguments_of_a_response_are_counted_once():
    def of(kind: str, **more: object) -> dict[str, object]:
        return {"type": f"response.{kind}", "item_id": "c0", **more}

    stream = parse(
        of("function_call_arguments.delta", delta="{"),
        of("function_call_arguments.delta", delta="}"),
        of("function_call_arguments.done", arguments="{}"),
        of("incomplete", response={"incomplete_details": {"reason": "max_output_tokens"}}),
    )
    assert [(one.text, one.kind) for one in stream.events] == [("{", "tool"), ("}", "tool")]
    assert (stream.finish_reason, stream.done, stream.completion_tokens) == ("length", True, None)


def new_bytes_per_read(raw: bytes, reads: int) -> int:
    """Parse bytes in reads; the memory that each read made, kept or not, added up."""
    made = 0
    size = -(-len(raw) // reads)

    def chunks():
        nonlocal made
        for start in range(0, len(raw), size):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            yield 1.0, raw[start : start + size]
            made += tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        list(sse.events(chunks()))
    finally:
        tracemalloc.stop()
    return made


def test_an_event_in_many_reads_is_not_copied_at_each():
    """Copying what is pending at each of n reads would make n / 2 times the bytes of the event."""
    raw = b"data: " + b"x" * 100_000 + b"\n\n"
    assert new_bytes_per_read(raw, 2_000) < 20 * len(raw)
