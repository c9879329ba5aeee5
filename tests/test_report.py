from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
import typing
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import proposal, verdict
from headway.core import Case, EngineInfo, Slo
from headway.fingerprint import Machine, Treatment
from headway.report import case_view, private, shape, text
from headway.report.document import ReportError, document, read_document
from headway.report.markdown import escape, markdown
from headway.report.terminal import terminal
from headway.suite import Limit

SCHEMA = json.loads(
    Path(__file__).parents[1].joinpath("docs/report.schema.json").read_text(encoding="utf-8")
)
RATIOS = (Limit("output_throughput", engine="b", over="a", min=0.95),)
NOTHING_PRIVATE = private.Private()


def report_of(factory, night, **more):
    judged = factory.judge(night, more.pop("load", lambda case: None))
    return document(night, judged, headway_version="0.1.0", **more)


@pytest.fixture
def slow(factory):
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.1)}
    return report_of(factory, factory.make_night(speeds, suite=factory.make_suite(limits=RATIOS)))


@pytest.fixture
def green(factory):
    return report_of(factory, factory.make_night(suite=factory.make_suite(limits=RATIOS)))


def nights(factory):
    """Return nights of every kind: good, slow, failing, wrong, invalid, unfinished, empty."""
    good = factory.make_night()
    spoilt = tuple(dataclasses.replace(r, invalid=("it slept",) * 9) for r in good.runs)
    yield good
    yield factory.make_night({"a": factory.Speed(fails=99), "b": factory.Speed(stamps=False)})
    yield factory.verified(good, first_wrong=3)
    yield dataclasses.replace(good, runs=spoilt)
    yield dataclasses.replace(good, runs=good.runs[:3], launches=good.launches[:1], finished=False)
    yield dataclasses.replace(good, runs=(), launches=(), steps=(), models={}, finished=False)
    yield dataclasses.replace(good, runs=(), launches=(), steps=(), expected=())


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("strict", [False, True])
def test_every_kind_of_night_fits_the_schema_and_is_read_back(factory, index, strict):
    night = list(nights(factory))[index]
    made = report_of(factory, night, strict=strict)
    written = json.dumps(made, allow_nan=False)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(written))
    assert read_document(written, "report.json") == made
    assert markdown(made)
    assert terminal(made, 80, color=False)


def test_the_schema_is_a_schema_and_names_every_field():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    kinds = [value for value in vars(shape).values() if dataclasses.is_dataclass(value)] + [
        Machine,
        Treatment,
        Limit,
    ]
    objects = [SCHEMA, *SCHEMA["$defs"].values()]
    listed = [set(o["properties"]) for o in objects if "properties" in o]
    for kind in kinds:
        assert {field.name for field in dataclasses.fields(kind)} in listed
    assert set(SCHEMA["$defs"]["verdict"]["enum"]) == set(typing.get_args(verdict.Verdict))


def at(made, path):
    for step in path:
        made = made[step]
    return made


@pytest.mark.parametrize(
    "path",
    [(), ("summary",), ("cells", 0), ("cells", 0, "findings", 0), ("cases", 0, "runs", 0)],
)
def test_the_schema_refuses_what_is_not_in_it_and_what_is_missing(green, path):
    validator = jsonschema.Draft202012Validator(SCHEMA)
    extra, short = copy.deepcopy(green), copy.deepcopy(green)
    at(extra, path)["surplus"] = 1
    at(short, path).popitem()
    for made in (extra, short):
        assert not validator.is_valid(made)
        with pytest.raises(ReportError, match="does not fit the schema"):
            read_document(json.dumps(made), "x")


def test_a_cell_says_everything_about_itself(slow):
    (cell,) = [
        c
        for c in slow["cells"]
        if (c["instance"], c["level"], c["metric"]) == ("b", "c4", "output_throughput")
    ]
    assert (cell["verdict"], cell["word"], cell["unit"]) == ("LIMIT", "SLOWER", "tokens/s")
    assert cell["message"].startswith("LIMIT b-w32_16-c4 output_throughput: 0.909 of a's")
    assert cell["direction"] == "higher"
    assert [s["value"] for s in cell["samples"]] == [pytest.approx(cell["value"])] * 2
    assert {f["gate"] for f in cell["findings"]} == {"limit", "baseline"}
    assert cell["findings"][0]["worse_by"] == pytest.approx(1 - 0.9091 / 0.95, abs=1e-3)


def test_the_summary_counts_what_was_compared_recording_and_missing(factory, slow):
    summary = slow["summary"]
    assert summary["exit_code"] == 1
    assert summary["verdicts"]["LIMIT"] == 2
    assert summary["words"]["SLOWER"] == 2
    assert sum(summary["verdicts"].values()) == summary["cells"] == len(slow["cells"])
    # Per case: success, token counts, equality; and b's ratio limit at two levels.
    assert summary["compared"] == 4 * 3 + 2
    assert summary["recording"] == 4 * 3
    empty = dataclasses.replace(factory.make_night(), runs=())
    assert report_of(factory, empty)["summary"]["missing"] > 80


def test_strict_changes_the_exit_code_only(factory):
    past = factory.baseline_nights()
    night = factory.dated(10, os="another")  # what was armed records anew: it is due
    stored = {case: factory.baseline_of(past, case) for case in night.suite.cases()}
    loose, strict = (
        report_of(factory, night, load=stored.get, strict=strict) for strict in (False, True)
    )
    assert (loose["summary"]["exit_code"], strict["summary"]["exit_code"]) == (0, 3)
    assert loose["cells"] == strict["cells"]


def test_the_engine_s_own_stamps_split_its_time_from_the_protocol_s(factory):
    night = factory.make_night({"a": factory.Speed(), "b": factory.Speed(stamps=False)})
    made = report_of(factory, night)
    runs = {c["instance"]: c["runs"][0] for c in made["cases"] if c["level"] == "c4"}
    split = runs["a"]["engine_split"]
    assert split["protocol_mean_s"] == pytest.approx(factory.PROTOCOL_S)
    assert split["engine_ttft_p50_s"] == pytest.approx(0.060 - factory.PROTOCOL_S - 0.0001)
    assert split["events"] == 16 * 16
    assert runs["b"]["engine_split"] is None


def test_requests_are_counted_by_what_became_of_them(factory):
    night = factory.make_night({"a": factory.Speed(fails=3)}, suite=factory.make_suite(("a",)))
    requests = report_of(factory, night)["cases"][1]["runs"][0]["requests"]
    assert requests == {
        "due": 16,
        "completed": 13,
        "failed": 3,
        "in_flight": 0,
        "errors": {"http_500": 3},
    }


def test_verified_outputs_are_counted(factory):
    speeds = {"a": factory.Speed(), "b": factory.Speed(salt=1)}
    night = factory.verified(factory.make_night(speeds), first_wrong=1)
    outputs = {c["instance"]: c["outputs"] for c in report_of(factory, night)["cases"]}
    assert report_of(factory, night)["cases"][1]["outputs"] == {
        "completed": 32,
        "verified": 31,
        "by_text": 0,
    }
    assert outputs["b"] is None  # The last of b's cases stands for its launches.
    unverified = dataclasses.replace(night, verifications={})
    assert report_of(factory, unverified)["cases"][0]["outputs"]["verified"] == 0


def test_outputs_that_were_verified_by_their_text_are_told_apart(factory):
    night = factory.verified(factory.make_night())
    by_text = {k: dataclasses.replace(v, by="text") for k, v in night.verifications.items()}
    made = report_of(factory, dataclasses.replace(night, verifications=by_text))
    assert made["cases"][1]["outputs"] == {"completed": 32, "verified": 32, "by_text": 32}
    said = "outputs verified without ids, by tokens that"
    assert said in markdown(made)
    assert said in " ".join(terminal(made, 200, color=False).split())
    assert said not in markdown(report_of(factory, night))


def test_the_view_with_vllm_s_keys_equals_numpy_by_vllm_s_definitions(factory):
    case = Case("a", "fake", "w32_16", "c4")
    speed = factory.Speed(fails=1)
    run = factory.make_run(case, 0, factory.level(4), speed)
    # Queueing in the client: vLLM does not see it.
    late = [dataclasses.replace(r, due_s=r.due_s - 0.010) for r in run.records]
    run = dataclasses.replace(run, records=tuple(late))
    view = case_view.vllm_view.view(run)
    done = [r for r in run.records if r.completed]
    duration = max(r.ended_s for r in run.records)
    ttft = np.array([r.events[0].at_s - r.sent_s for r in done]) * 1e3
    e2el = np.array([r.events[-1].at_s - r.sent_s for r in done]) * 1e3
    assert (view["completed"], view["failed"], view["num_prompts"]) == (15, 1, 16)
    assert (view["total_input_tokens"], view["total_output_tokens"]) == (15 * 32, 15 * 16)
    assert view["duration"] == duration
    assert view["request_throughput"] == pytest.approx(15 / duration)
    assert view["output_throughput"] == pytest.approx(240 / duration)
    assert view["total_token_throughput"] == pytest.approx((480 + 240) / duration)
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", (e2el - ttft) / 15)):
        assert view[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert view[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert view[f"std_{name}_ms"] == pytest.approx(np.std(values), abs=1e-9)
        assert view[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99))
    assert view["median_itl_ms"] == pytest.approx(12.0)
    assert (view["max_concurrent_requests"], view["request_rate"]) == (4, "inf")


def test_case_01_the_view_says_null_where_vllm_says_zero(factory):
    case = Case("a", "fake", "w32_16", "c1")
    run = factory.make_run(case, 0, factory.level(1), factory.Speed(fails=99))
    view = case_view.vllm_view.view(run)
    assert view["completed"] == 0
    assert view["mean_ttft_ms"] is view["p99_tpot_ms"] is view["std_itl_ms"] is None


def test_case_29_a_thousand_requests_a_case_stay_small_and_say_nothing_private(factory):
    levels = [factory.level(c, 1000) for c in (1, 2, 4, 8)]
    suite = factory.make_suite(
        ("a", "b"),
        levels,
        launches=1,
        args={"api_key": "sk-verysecretverysecret", "extra": ["--api-key", "hunter22", "--x=1"]},
        env={"HF_TOKEN": "hf_abcdefghijklmnopqrst", "VLLM_BACKEND": "flash"},
    )
    speeds = {"a": factory.Speed(fails=5), "b": factory.Speed()}
    night = factory.make_night(speeds, suite=suite)
    broken = factory.make_launch(
        "b",
        0,
        speeds["b"],
        attempt=2,
        failure="/home/jane/venv/bin/python died on ci-runner-7: Authorization: Bearer abcdefgh123",
        failure_kind="died",
    )
    night = dataclasses.replace(night, launches=(*night.launches, broken))
    hide = private.Private("/opt/people/jane", "ci-runner-7")
    made = report_of(factory, night, hide=hide)
    everything = [json.dumps(made), markdown(made), terminal(made, 120, color=False)]
    assert len(everything[0]) < 1_000_000
    for output in everything:
        for secret in ("SECRET PROMPT", "sk-very", "hunter22", "hf_abc", "jane", "ci-runner-7"):
            assert secret not in output
        assert "abcdefgh123" not in output
    engine = made["instances"][0]["treatment"]
    assert engine["env"] == {"HF_TOKEN": private.HIDDEN, "VLLM_BACKEND": "flash"}
    assert engine["args"]["extra"] == ["--api-key", private.HIDDEN, "--x=1"]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("--api-key", True),
        ("apiKey", True),
        ("db_password", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("max_tokens", False),
        ("tokenizer", False),
        ("monkey", False),
        ("kv_cache_dtype", False),
    ],
)
def test_what_counts_as_a_secret(name, secret):
    assert private.is_secret(name) is secret


@pytest.mark.parametrize(
    "foreign",
    [
        "sk-proj-0123456789abcdefXYZ",
        "use hf_0123456789abcdefXYZ now",
        "Authorization: Basic dXNlcjpodW50ZXIyMg==",
        "https://jane:hunter22@host/v1",
        "/Users/jane/x and /home/jane",
    ],
)
def test_what_looks_private_is_hidden_under_any_name(foreign):
    shown = NOTHING_PRIVATE.value({"note": [foreign]})["note"][0]
    for secret in ("0123456789abcdef", "dXNl", "jane", "hunter22"):
        assert secret not in shown


@pytest.mark.parametrize("name", ["hf_static_b-w32_12-c4 tpot_p50", "hf_naive_a-w128_64_long-c128"])
def test_a_cell_whose_engine_is_named_like_a_key_is_none(name):
    assert NOTHING_PRIVATE.text(name) == name


def test_settings_that_json_cannot_hold_become_text():
    value = NOTHING_PRIVATE.value({"a": math.inf, "b": (1, math.nan), "c": Path("/home/u/x")})
    assert value == {"a": "inf", "b": [1, "nan"], "c": "~/x"}


def test_the_default_hides_this_machine_s_home_and_host(factory, monkeypatch):
    monkeypatch.setenv("HOME", "/srv/people/jane")
    monkeypatch.setattr("platform.node", lambda: "build-box-9.example.org")
    night = factory.make_night()
    info = EngineInfo("k", "1", "m", "float32", "cpu", {"at": "/srv/people/jane/m on build-box-9"})
    launches = tuple(dataclasses.replace(r, info=info) for r in night.launches)
    made = report_of(factory, dataclasses.replace(night, launches=launches))
    assert made["instances"][0]["treatment"]["settings"] == {"at": "~/m on (host)"}


def test_a_truncated_report_is_refused_wherever_it_was_cut(green):
    whole = json.dumps(green)
    for length in range(0, len(whole) - 1, 4999):
        with pytest.raises(ReportError, match=r"^old\.json ") as caught:
            read_document(whole[:length], "old.json")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema=1), "has schema 1; this Headway reads 5"),
        (lambda d: d.update(format="x"), "is not a report of Headway"),
        (lambda d: d.pop("night"), "report.night is missing"),
        (lambda d: d["cells"][0].pop("unit"), r"report\.cells\[0\]\.unit is missing"),
        (lambda d: d["cells"][0].update(value="1"), r"report\.cells\[0\]\.value"),
        (lambda d: d["cells"][0].update(value=math.nan), "holds NaN"),
        (lambda d: d["cells"][3].update(verdict="FINE"), "must be one of 'WRONG'"),
    ],
)
def test_a_report_that_cannot_be_used_is_one_sentence(green, edit, message):
    edit(green)
    with pytest.raises(ReportError, match=message) as caught:
        read_document(json.dumps(green), "old.json")
    assert str(caught.value).startswith("old.json ")


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "cut off"), ("hello", "is not JSON"), ("[1]", "not a report"), ("null", "not a report")],
)
def test_a_file_that_is_no_report_is_one_sentence(content, message):
    with pytest.raises(ReportError, match=message):
        read_document(content, "x.json")


def test_markdown_starts_with_the_counts_and_lists_failures_before_recordings(slow):
    shown = markdown(slow)
    assert shown.startswith("**Headway smoke: 2 SLOWER, ")
    assert "0.91x (min 0.95)" in shown
    assert shown.index("### Failures (2 cells)") < shown.index("<summary>Recording")
    head = "- **SLOWER** b: output throughput 4.3% beyond the limit at c1, c4 (2 cells)"
    at = shown.splitlines().index(head)
    assert shown.splitlines()[at + 1].startswith("  - b-w32_16-c4 output_throughput: 0.909 of a's")
    row = next(line for line in shown.splitlines() if line.startswith("| w32_16 | c4 | b |"))
    assert row.split(" | ")[3:] == [
        "242",
        "0.91x (min 0.95)",
        "66.0",
        "13.2",
        "264",
        "32/32",
        "32/32",
        "**SLOWER** |",
    ]


HOSTILE = (
    "a|b`</details><script>x</script>\n# h\r\n| c |\u2028[l](http://e.x) \x1b[31m*x* __y__ @me"
)


def hostile(factory, name=HOSTILE):
    suite = factory.make_suite((name, "b"), description=name)
    night = factory.make_night({name: factory.Speed(fails=1), "b": factory.Speed()}, suite=suite)
    return report_of(factory, night)


def test_case_28_a_hostile_name_cannot_break_out_of_markdown(factory):
    lines = markdown(hostile(factory)).splitlines()
    rows = [line for line in lines if line.startswith("| w32_16 |")]
    # Eleven columns are twelve bars, whatever the name holds.
    assert [row.count("|") for row in rows] == [12] * 4
    shown = "\n".join(lines)
    assert shown.count("<details>") == shown.count("</details>")
    for mark in ("<script", "`", "\x1b", "http://", "@me", "*x*", "__y__", "\u2028"):
        assert mark not in shown
    assert not [line for line in lines if line.startswith("# h")]


@given(st.text())
def test_escaped_text_is_one_line_without_markup(foreign):
    shown = escape(foreign)
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"[\\`*\[\]<>|~@$]", shown)
    assert not re.search(r"&(?!#\d+;)", shown)
    assert shown.isprintable()


@pytest.mark.parametrize("name", ["hf_naive", "w64_16", "vllm_8k-chat-c8"])
def test_ordinary_names_stay_readable(name):
    assert escape(name) == name


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_the_terminal_keeps_within_its_width(factory, width, color):
    shown = terminal(hostile(factory, HOSTILE * 4), width, color)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(len(line) for line in plain.splitlines()) <= width
    assert ("\x1b[" in shown) is color


def test_the_terminal_shows_ratio_verified_outputs_and_verdict_per_level(slow):
    lines = terminal(slow, 80, color=False).splitlines()
    row = next(i for i, line in enumerate(lines) if line.strip() == "w32_16 c4")
    assert " ".join(lines[row + 1].split()) == "a 267 60.0 12.0 240 32/32 OK, recording"
    assert " ".join(lines[row + 2].split()) == "b 242 0.91x 66.0 13.2 264 32/32 SLOWER"
    assert "SLOWER b: output throughput 4.3% beyond the limit at c1, c4 (2 cells)" in lines
    assert "Next: find what fails its limit" in "\n".join(lines[-3:])


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_does_not_read_markup_or_emoji(factory, width):
    shown = terminal(hostile(factory, "[red]x[/] :smile:"), width, color=False)
    assert "[red]x[/] :smi" in shown


def test_the_terminal_ignores_the_environment(slow, monkeypatch):
    before = terminal(slow, 80, color=False)
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "20", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert terminal(slow, 80, color=False) == before


def test_one_cause_is_told_once(factory):
    night = factory.make_night({"a": factory.Speed(fails=3), "b": factory.Speed()})
    shown = terminal(report_of(factory, night), 120, color=False)
    assert shown.count("SLOWER a: 6 of 24 requests failed (6 http_500), at c1, c4 (44 cells)") == 1
    assert shown.count("requests failed") == 2
    row = next(line for line in shown.splitlines() if line.split()[:1] == ["a"])
    assert row.split()[:2] == ["a", "-"]


def test_the_next_step_fits_the_outcome(factory, green):
    assert terminal(green, 80, color=False, run="reports/x").splitlines()[-1] == (
        "Next: record a baseline: headway baseline propose reports/x"
    )
    night = factory.make_night()
    wrong = report_of(factory, factory.verified(night, first_wrong=1))
    assert "outputs are wrong" in terminal(wrong, 80, color=False).splitlines()[-1]
    stopped = report_of(factory, dataclasses.replace(night, finished=False))
    assert "resumes" in terminal(stopped, 80, color=False).splitlines()[-1]
    past = factory.baseline_nights()
    stored = {case: factory.baseline_of(past, case) for case in night.suite.cases()}
    done = report_of(factory, night, load=stored.get)
    assert terminal(done, 80, color=False).splitlines()[-1] == "Next: nothing to do."
    slower = factory.make_night({"a": factory.Speed(), "b": factory.Speed(slower=0.12)})
    lines = terminal(report_of(factory, slower, load=stored.get), 160, color=False).splitlines()
    assert "headway baseline accept" in lines[-1]
    assert lines[-2].startswith("6 SLOWER, ")


def test_nothing_held_is_not_ok(factory):
    night = factory.make_night({"a": factory.Speed()}, suite=factory.make_suite(("a",)))
    made = report_of(factory, night)
    made["cells"] = [c for c in made["cells"] if c["metric"] == "ttft_p50"]
    assert "CAN'T TELL YET" in markdown(made).splitlines()[4]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345, "12,345"),
    ],
)
def test_numbers_have_about_three_digits(value, shown):
    assert text.digits(value) == shown


def test_foreign_text_becomes_one_plain_line():
    assert text.plain("a\r\n b\u2028c\td") == "a b c d"
    assert text.plain("x\x1b[31m\u202e\udcff") == "x\N{REPLACEMENT CHARACTER}[31m" + (
        "\N{REPLACEMENT CHARACTER}" * 2
    )


def test_counts_read_well():
    assert text.count(1, "launch") == "1 launch"
    assert text.count(2, "launch") == "2 launches"
    assert text.few(["a", "b", "c", "d"]) == "a, b, c and 1 more"


def test_importing_the_layer_brings_in_nothing_heavy():
    program = (
        "import sys\n"
        "from headway.report import compare, document, markdown, terminal\n"
        "heavy = {'rich', 'scipy', 'numpy', 'torch', 'socket', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    source = str(Path(verdict.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_second_try_is_never_silent(factory):
    night = factory.make_night()
    first = dataclasses.replace(night.runs[0], invalid=("the client slept",), attempt=1)
    second = dataclasses.replace(night.runs[0], attempt=2)
    night = dataclasses.replace(night, runs=(first, *night.runs[1:], second))
    made = report_of(factory, night)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(made)))
    replaced = {c["instance"] + c["level"]: c["replaced"] for c in made["cases"] if c["replaced"]}
    assert replaced == {"ac1": [{"launch": 1, "attempt": 1, "reasons": ["the client slept"]}]}
    assert [run["attempt"] for run in made["cases"][0]["runs"]] == [2, 1]
    line = "1 Run was replaced: a-w32_16-c1 launch 1 attempt 1: the client slept"
    assert line in markdown(made).splitlines()
    assert line in terminal(made, 80, color=False).splitlines()
    assert made["summary"]["exit_code"] == 0


def test_what_has_no_gate_is_counted_as_watched_and_not_as_ok(factory, green):
    cells = [c for c in green["cells"] if {f["gate"] for f in c["findings"]} == {"watch"}]
    assert {(c["verdict"], c["word"]) for c in cells} == {("PASS", "watched")}
    words = green["summary"]["words"]
    assert words["watched"] == len(cells) > 60
    assert words["OK"] == green["summary"]["verdicts"]["PASS"] - len(cells)
    assert list(words) == ["CAN'T TELL YET", "OK", "watched"]
    head = markdown(green).splitlines()[0]
    assert head.endswith(f"{words['OK']} OK, {words['watched']} watched** (exit code 0)")
    green["cells"] = cells
    assert markdown(green).splitlines()[4].endswith("| watched |")


def test_where_a_model_lies_is_in_no_report_and_no_baseline(factory, tmp_path):
    suite = factory.make_suite(("a",), model="/srv/jane/models/mine")
    night = factory.make_night({"a": factory.Speed()}, suite=suite)
    facts = dataclasses.replace(night.models["mine"], name="/srv/jane/models/mine")
    night = dataclasses.replace(night, models={"mine": facts})
    made = report_of(factory, night)
    nights = [
        dataclasses.replace(night, night=f"n{day}", started_at=f"2026-11-0{day}T00:00:00Z")
        for day in range(1, 6)
    ]
    changes = proposal.propose(suite, factory.recorded(nights), tmp_path).changes
    assert changes
    texts = [json.dumps(made), markdown(made), terminal(made, 80, color=False)]
    texts += [text for _, *both in changes for text in both] + [path.name for path, *_ in changes]
    assert not [text for text in texts if "jane" in text]
    assert made["models"] == [{"name": "mine", "revision": "r1"}]
    assert {c["model"] for c in made["cells"]} == {made["instances"][0]["model"]} == {"mine"}
    assert made["cases"][0]["runs"][0]["vllm_bench_serve"]["model_id"] == "mine"


def test_a_goodput_is_reported_with_its_slo(factory):
    at = dataclasses.replace(factory.level(4), slo=Slo(ttft_s=0.05, tpot_s=0.02))
    night = factory.make_night({"a": factory.Speed()}, suite=factory.make_suite(("a",), [at]))
    made = report_of(factory, night)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(made)))
    (cell,) = [c for c in made["cells"] if c["metric"] == "goodput"]
    assert cell["value"] == 0.0  # TTFT is 60 ms
    assert cell["definition"].endswith("; SLO: ttft_s <= 0.05, tpot_s <= 0.02")
    # vLLM's clock starts at the send, 0.1 ms later.
    assert made["cases"][0]["runs"][0]["vllm_bench_serve"]["request_goodput"] == 0.0
    run = night.runs[0]
    for limit, good in ((0.05985, 0), (0.0599001, 16)):
        level = dataclasses.replace(at, slo=Slo(ttft_s=limit))
        view = case_view.vllm_view.view(dataclasses.replace(run, level=level))
        assert view["request_goodput"] == pytest.approx(good / view["duration"])
