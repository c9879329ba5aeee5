"""A trace is read as it was recorded, or refused with its file and line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.lengths import Trace
from headway.suite import SuiteError
from headway.suite.traces import read_trace

CSV = "time_s,prompt_tokens,output_tokens,user\n10.5,100,20,x\n10.5,7,1,y\n\n12.25,3000,256,x\n"
JSONL = (
    '{"time_s": 10.5, "prompt_tokens": 100, "output_tokens": 20, "user": "x"}\n'
    '{"time_s": 10.5, "prompt_tokens": 7, "output_tokens": 1}\n'
    "\n"
    '{"output_tokens": 256, "prompt_tokens": 3000, "time_s": 12.25}\n'
)
TIMES, PROMPTS, OUTPUTS = (0.0, 0.0, 1.75), (100, 7, 3000), (20, 1, 256)


@pytest.fixture
def read(tmp_path):
    """Return a function from a name and a text to the trace that they are."""

    def make(name: str, text: str | bytes) -> Trace:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(path)

    return make


@pytest.fixture
def refused(read, tmp_path):
    """Return a function to the sentence that a trace is refused with."""

    def make(name: str, text: str | bytes) -> str:
        with pytest.raises(SuiteError) as caught:
            read(name, text)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path / name), "FILE")

    return make


@pytest.mark.parametrize(("name", "text"), [("t.csv", CSV), ("t.jsonl", JSONL)])
def test_a_trace_is_times_from_its_first_and_lengths(read, name, text):
    assert read(name, text) == Trace(name, TIMES, PROMPTS, OUTPUTS)


@pytest.mark.parametrize("change", ["\r\n", "bom", "order"])
def test_a_spreadsheets_csv_is_read_too(read, change):
    text = CSV
    if change == "\r\n":
        text = CSV.replace("\n", "\r\n")
    elif change == "bom":
        text = "\ufeff" + CSV
    else:
        text = "output_tokens,time_s,prompt_tokens\n20,10.5,100\n1,10.5,7\n256,12.25,3000\n"
    assert read("t.csv", text) == Trace("t.csv", TIMES, PROMPTS, OUTPUTS)


rows = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1
)


@given(rows)
def test_both_forms_say_the_same(tmp_path_factory, rows):
    rows = sorted(rows, key=lambda row: row[0])
    names = ("time_s", "prompt_tokens", "output_tokens")
    folder = tmp_path_factory.mktemp("t")
    lines = [",".join(names), *(",".join(map(repr, row)) for row in rows)]
    (folder / "t.csv").write_text("\n".join(lines))
    (folder / "t.jsonl").write_text(
        "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    )
    one, other = read_trace(folder / "t.csv"), read_trace(folder / "t.jsonl")
    assert (one.times_s, one.prompt_tokens, one.output_tokens) == (
        tuple(at - rows[0][0] for at, _, _ in rows),
        tuple(prompt for _, prompt, _ in rows),
        tuple(output for _, _, output in rows),
    )
    assert one.times_s == other.times_s
    assert one.output_tokens == other.output_tokens


HEAD = "time_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.txt", CSV, "FILE must end in .csv or .jsonl: it is a trace to replay"),
        ("t.csv", b"\xff\xfe", "FILE is not UTF-8 text: .*"),
        ("t.csv", "", "FILE line 1: the column time_s is missing; a trace has time_s, .*"),
        ("t.csv", "time_s,prompt_tokens\n1,2\n", "FILE line 1: the column output_tokens is .*"),
        ("t.csv", HEAD, "FILE holds no request"),
        ("t.jsonl", "\n\n", "FILE holds no request"),
        ("t.csv", HEAD + "1,2\n", "FILE line 2: output_tokens is missing"),
        ("t.csv", HEAD + "1,2,3\nx,2,3\n", "FILE line 3: time_s is 'x'; it must be a finite .*"),
        ("t.csv", HEAD + "1,2,3\n\nnan,2,3\n", "FILE line 4: time_s is 'nan'; it must be .*"),
        ("t.csv", HEAD + "-1,2,3\n", "FILE line 2: time_s is -1; it must be 0 or above"),
        ("t.csv", HEAD + "1,0,3\n", "FILE line 2: prompt_tokens is 0; it must be a whole .*"),
        ("t.csv", HEAD + "1,2,3.5\n", "FILE line 2: output_tokens is 3.5; it must be a whole .*"),
        ("t.csv", HEAD + "2,2,3\n1,2,3\n", "FILE line 3: time_s is 1 after 2; times never .*"),
        ("t.jsonl", JSONL + "{", "FILE line 5 is not JSON: .*"),
        ("t.jsonl", "[1, 2, 3]\n", "FILE line 1 is no JSON object with time_s, .*"),
        ("t.jsonl", '{"time_s": 1}\n', "FILE line 1: prompt_tokens is missing"),
        ("t.jsonl", '{"time_s": true}\n', "FILE line 1: time_s is True; it must be a finite .*"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(refused, name, text, says):
    message = refused(name, text)
    assert re.fullmatch(says, message), message


def test_a_trace_that_is_not_there_is_said(tmp_path):
    with pytest.raises(SuiteError, match=r"none\.csv cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")
