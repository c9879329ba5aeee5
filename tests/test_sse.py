"""Timed bytes of an event stream become token events: the cases that other tools got wrong."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from headway import sse
from headway.core import RequestRecord
from headway.metrics import e2el_s, itl_s, tpot_s, ttfc_s, ttft_s

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(**parts: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": parts, "finish_reason": None}]})


def said(text: str) -> bytes:
    return delta(content=text)


def completion(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def finish(reason: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return event({"choices": [], "usage": counts})


ROLE = delta(role="assistant", content="")


def text_of(stream: sse.Stream) -> str:
    return "".join(one.text for one in stream.events)


def times(stream: sse.Stream) -> list[float]:
    return [one.at_s for one in stream.events]


def record(stream: sse.Stream, ended_s: float = 9.0) -> RequestRecord:
    """What the metrics of a request see of its stream, due and sent at 0."""
    return RequestRecord(
        0, 0.0, 0.0, ended_s, stream.events, completion_tokens=stream.completion_tokens
    )


@pytest.mark.parametrize("piece", [said, completion], ids=["chat", "completions"])
def test_case_3_the_end_is_the_last_token_not_the_usage_or_the_close(piece):
    stream = sse.parse(
        [
            (0.050, ROLE),
            (0.200, piece("a")),
            (0.210, piece("b")),
            (0.220, piece("c")),
            (0.220, finish("stop")),
            (0.290, usage(5, 3)),
            (0.291, DONE),
        ]
    )
    one = record(stream)
    assert times(stream) == [0.200, 0.210, 0.220]
    assert (ttft_s(one), e2el_s(one), tpot_s(one)) == (0.200, 0.220, pytest.approx(0.010))
    assert itl_s(one) == [b - a for a, b in pairwise([0.200, 0.210, 0.220])]
    assert (stream.prompt_tokens, stream.completion_tokens) == (5, 3)
    assert (stream.finish_reason, stream.done, stream.warnings) == ("stop", True, ())


@pytest.mark.parametrize(
    "keys", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")]
)
def test_case_7_reasoning_is_output_and_counted_once(keys):
    stream = sse.parse(
        [
            (0.100, delta(**dict.fromkeys(keys, "Okay"))),
            (0.120, delta(**dict.fromkeys(keys, ","))),
            (0.140, said("\n\n")),
            (0.160, said("4")),
            (0.161, usage(8, 4)),
            (0.161, DONE),
        ]
    )
    one = record(stream)
    assert (ttft_s(one), tpot_s(one)) == (0.100, pytest.approx(0.020))
    assert ttfc_s(one) == 0.140
    assert [event.kind for event in stream.events] == ["reasoning"] * 2 + ["content"] * 2
    assert stream.completion_tokens == 4
    assert text_of(stream) == "Okay,\n\n4"


def test_case_7_thought_alone_has_no_first_content():
    one = record(sse.parse([(0.1, delta(reasoning="Hm")), (0.2, finish("length")), (0.2, DONE)]))
    assert (ttft_s(one), ttfc_s(one)) == (0.1, None)


@pytest.mark.parametrize("first", [b"", event({"choices": []}), event({"object": "chunk"})])
def test_case_8_events_without_a_choice_are_metadata(first):
    stream = sse.parse(
        [(0.05, first), (0.1, said("a")), (0.2, said("b")), (0.21, usage(3, 2)), (0.21, DONE)]
    )
    assert (times(stream), stream.completion_tokens, stream.error) == ([0.1, 0.2], 2, None)


def test_case_9_a_space_at_the_edge_of_a_read_survives():
    reads = [
        b"data:",
        b' {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"',
        b' y"}}]}\n\nda',
        b"ta: [DO",
        b"NE]\n\n",
    ]
    stream = sse.parse(enumerate(reads))
    assert [(one.at_s, one.text) for one in stream.events] == [(1, "x"), (3, " y")]
    assert stream.done
    assert stream.error is None
    raw = b"".join(reads)
    for place in range(len(raw) + 1):
        stream = sse.parse([(1.0, raw[:place]), (2.0, raw[place:])])
        assert [one.text for one in stream.events] == ["x", " y"]
        assert (stream.done, stream.error) == (True, None)


def test_case_10_a_character_split_over_two_reads_stays_whole():
    reads = [
        b'data: {"choices":[{"index":0,"delta":{"content":"\xe8\xaa',
        b'\x9e"}}]}\n\n',
        DONE,
    ]
    stream = sse.parse(enumerate(reads))
    assert [(one.at_s, one.text) for one in stream.events] == [(1, "\u8a9e")]
    assert stream.error is None


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_case_10_what_python_calls_a_line_end_is_text(character):
    raw = json.dumps({"choices": [{"text": f"a{character}b"}]}, ensure_ascii=False)
    stream = sse.parse([(0, b"data: " + raw.encode() + b"\n\n")])
    assert [one.text for one in stream.events] == [f"a{character}b"]


@pytest.mark.parametrize("byte", [b"\x0b", b"\x0c", b"\x1c", b"\x00"])
def test_case_10_only_cr_and_lf_end_a_line(byte):
    assert list(sse.events([(0, b"data: a" + byte + b"b\n\n")])) == [(0, b"a" + byte + b"b")]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False], ids=["blank_line_last", "no_blank_line_last"])
@pytest.mark.parametrize("space", ["", " "])
def test_case_11_line_ends_spaces_and_a_missing_blank_line(end, last, space):
    body = '{"choices":[{"index":0,"delta":{"content":"a"}}]}'
    raw = (
        f"data:{space}{body}{end}{end}data:{space}[DONE]{end if last else ''}{end if last else ''}"
    )
    stream = sse.parse([(1.0, raw.encode())])
    assert [one.text for one in stream.events] == ["a"]
    assert stream.done
    assert stream.error is None


def test_case_11_one_space_after_the_colon_is_removed_and_no_more():
    assert list(sse.events([(0, b"data:  x\n\ndata:y\n\ndata: \tz\n\n")])) == [
        (0, b" x"),
        (0, b"y"),
        (0, b"\tz"),
    ]


def test_case_11_a_cut_last_event_is_named_not_raised():
    stream = sse.parse([(0.1, said("a")), (0.2, b'data: {"choices":[{"te')])
    assert times(stream) == [0.1]
    assert stream.error is not None
    assert stream.error.kind == "malformed_event"
    assert '{"choices":[{"te' in stream.error.message


def test_case_12_comments_and_other_fields_are_no_events():
    stream = sse.parse(
        [
            (0.05, b":\n\n"),
            (0.10, b": keepalive\n\n"),
            (0.12, b"event: ping\n\n"),
            (0.13, b"retry: 3000\n\n"),
            (0.14, b"id: 7\nunknown\n\n"),
            (0.200, said("x")),
            (0.250, b":\n\n"),
            (0.260, b"data:\n\n"),
            (0.270, b"data\n\n"),
            (0.300, said("y")),
            (0.300, DONE),
        ]
    )
    assert times(stream) == [0.200, 0.300]
    assert (stream.error, stream.warnings) == (None, ())
    assert itl_s(record(stream)) == [pytest.approx(0.1)]


def test_case_13_an_end_marker_alone_is_no_token():
    stream = sse.parse([(0.1, DONE)])
    assert (stream.events, stream.done, stream.completion_tokens) == ((), True, None)
    assert ttft_s(record(stream)) is None


def test_case_13_a_stream_of_tool_calls_only_has_tokens():
    def call(arguments: str, **more: object) -> bytes:
        return delta(tool_calls=[{"index": 0, "function": {"arguments": arguments, **more}}])

    stream = sse.parse(
        [(0.1, call("", name="f")), (0.2, call('{"a"')), (0.3, call(":1}")), (0.3, DONE)]
    )
    assert times(stream) == [0.2, 0.3]
    assert text_of(stream) == '{"a":1}'
    assert [one.kind for one in stream.events] == ["tool", "tool"]
    assert ttfc_s(record(stream)) == 0.2


def test_case_14_a_stream_cut_between_events_keeps_its_tokens_and_no_end():
    stream = sse.parse([(0.1, said("a")), (0.2, said("b"))])
    assert times(stream) == [0.1, 0.2]
    assert (stream.done, stream.finish_reason, stream.error, stream.warnings) == (
        False, None, None, ()
    )  # fmt: skip


def test_case_14_a_finish_without_done_is_a_warning():
    stream = sse.parse([(0.1, said("a")), (0.2, finish("stop"))])
    assert (stream.warnings, stream.done, stream.error) == (("missing_done",), False, None)


def test_case_23_tokens_are_those_of_the_server_not_one_a_chunk():
    chunks = [(at, said(text)) for at, text in [(0.1, "a"), (0.2, "b"), (0.3, "c"), (0.4, "d")]]
    stream = sse.parse([*chunks, (0.4, usage(6, 4)), (0.4, DONE)])
    one = record(stream)
    assert (stream.prompt_tokens, stream.completion_tokens) == (6, 4)
    assert [event.num_tokens for event in stream.events] == [None] * 4
    assert tpot_s(one) == pytest.approx(0.1)
    assert itl_s(one) == [pytest.approx(0.1)] * 3


def test_events_of_one_read_are_counted():
    three = said("a") + said("b") + ROLE + said("c")
    stream = sse.parse([(0.1, three), (0.2, said("d")), (0.3, said("e")[:9]), (0.4, said("e")[9:])])
    assert sse.merged(stream.events) == 2
    assert sse.merged(()) == sse.merged(stream.events[:1]) == 0


def test_an_event_is_stamped_by_the_read_that_completed_it():
    whole = said("a") + said("b")
    cut = len(said("a")) - 1  # all but the last line end
    stream = sse.parse([(1.0, whole[:5]), (2.0, whole[5:cut]), (3.0, whole[cut:])])
    assert times(stream) == [3.0, 3.0]
    stream = sse.parse([(1.0, whole[: cut + 1]), (2.0, b""), (3.0, whole[cut + 1 :])])
    assert times(stream) == [1.0, 3.0]


def test_an_unfinished_line_is_stamped_by_the_last_read_that_had_bytes():
    assert list(sse.events([(1.0, b"data: "), (2.0, b"x"), (3.0, b"")])) == [(2.0, b"x")]


def test_a_crlf_over_two_reads_is_one_line_end():
    first, second = b"data: a\r", b"\ndata: b\r\n\r\n"
    assert list(sse.events([(1, first), (2, second)])) == [(2, b"a\nb")]
    # The blank line is complete with its CR: the LF that follows is nothing new.
    assert list(sse.events([(1, b"data: a\r\n\r"), (2, b"\ndata: b\n\n")])) == [
        (1, b"a"),
        (2, b"b"),
    ]


def test_line_ends_may_be_mixed():
    raw = b"data: a\r\rdata: b\n\ndata: c\r\n\ndata: d\n\r\ndata: e\r\n\r"
    assert [data for _, data in sse.events([(0, raw)])] == [b"a", b"b", b"c", b"d", b"e"]


def test_lines_of_one_event_are_joined():
    raw = b'data: {"choices":\ndata: [{"text":\ndata:"ab"}]}\n\n'
    assert text_of(sse.parse([(0, raw)])) == "ab"


def test_a_byte_order_mark_hides_no_event():
    stream = sse.parse([(0, b"\xef"), (1, b"\xbb\xbf" + said("a")), (2, DONE)])
    assert text_of(stream) == "a"
