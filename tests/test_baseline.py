from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from pathlib import Path

import pytest

from headway import baseline, metrics, proposal
from headway.core import Case
from headway.fingerprint import slug
from headway.suite import BaselineGate, Limit, SuiteError, load

CASE = Case("b", "fake", "w32_16", "c4")


@pytest.fixture
def stored(factory):
    return factory.baseline_of(factory.baseline_nights(2), CASE)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def edited(stored, edit):
    data = json.loads(baseline.dump(stored))
    edit(data)
    return json.dumps(data)


def test_dump_and_load_are_inverse(stored, tmp_path):
    path = write(tmp_path / "b.json", baseline.dump(stored))
    assert baseline.load(path) == stored
    assert baseline.dump(baseline.load(path)) == baseline.dump(stored)


def test_case_26_no_file_is_no_baseline(tmp_path):
    assert baseline.load(tmp_path / "none.json") is None


def set_sample(value):
    def edit(data):
        data["cells"]["ttft_p50"]["samples"][0]["value"] = value

    return edit


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
def test_case_25_a_latency_that_no_measurement_gives_is_refused(stored, tmp_path, value):
    path = write(tmp_path / "b.json", edited(stored, set_sample(value)))
    with pytest.raises(baseline.BaselineError, match="record it again"):
        baseline.load(path)


@pytest.mark.parametrize("unit", ["ms", "", "tok/s"])
def test_case_27_an_unknown_unit_is_refused(stored, tmp_path, unit):
    def edit(data):
        data["cells"]["ttft_p50"]["unit"] = unit

    path = write(tmp_path / "b.json", edited(stored, edit))
    with pytest.raises(baseline.BaselineError, match=r"has unit .*; allowed: s, tokens/s"):
        baseline.load(path)


def test_case_27_a_missing_unit_is_refused(stored, tmp_path):
    path = write(tmp_path / "b.json", edited(stored, lambda d: d["cells"]["ttft_p50"].pop("unit")))
    with pytest.raises(baseline.BaselineError, match="unit is missing"):
        baseline.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a baseline"),
        ("{", "is not a baseline"),
        ("[]", "has schema None"),
        ('{"schema": 2}', "has schema 2; this Headway reads 1"),
        ('{"schema": 1}', r"baseline\.identity is missing"),
    ],
)
def test_a_broken_or_foreign_file_is_one_sentence(tmp_path, text, message):
    path = write(tmp_path / "b.json", text)
    with pytest.raises(baseline.BaselineError, match=message) as caught:
        baseline.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused_wherever_it_was_cut(stored, tmp_path):
    text = baseline.dump(stored)
    for length in range(0, len(text) - 2, 97):
        path = write(tmp_path / "b.json", text[:length])
        with pytest.raises(baseline.BaselineError):
            baseline.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "b.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(baseline.BaselineError, match="cannot be read"):
        baseline.load(tmp_path / "b.json")


def test_merge_adds_a_night_and_replaces_the_same_one(factory):
    nights = factory.baseline_nights(3)
    stored = factory.baseline_of(nights, CASE)
    assert stored.cells["ttft_p50"].num_nights == 3
    assert len(stored.cells["ttft_p50"].samples) == 6
    again = baseline.merge(stored, factory.baseline_of(nights[2:], CASE))
    assert again.cells["ttft_p50"].samples == stored.cells["ttft_p50"].samples


@pytest.mark.parametrize("field", ["identity", "environment"])
def test_a_new_epoch_drops_what_was_measured_in_the_old_one(factory, field):
    first, second = factory.baseline_nights(2)
    old = factory.baseline_of([first], CASE)
    other = dataclasses.replace(old, **{field: {**getattr(old, field), "cpu": "another"}})
    merged = baseline.merge(other, factory.baseline_of([second], CASE))
    assert {s.night for s in merged.cells["ttft_p50"].samples} == {second.night}


def git(folder, *arguments):
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def test_the_patch_applies_to_new_and_to_known_files(factory, tmp_path):
    first, second = factory.baseline_nights(2)
    old = factory.baseline_of([first], CASE)
    new = factory.baseline_of([first, second], CASE)
    known = baseline.path_of(tmp_path / "baselines", "Test CPU x2", CASE)
    other = dataclasses.replace(CASE, instance="a")
    fresh = baseline.path_of(tmp_path / "baselines", "Test CPU x2", other)
    known.parent.mkdir(parents=True)
    # A file that someone edited by hand may have lost its last newline.
    known.write_text(baseline.dump(old).rstrip("\n"), encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "old")
    changes = [
        (known, known.read_text(encoding="utf-8"), baseline.dump(new)),
        (fresh, "", baseline.dump(old)),
    ]
    write(tmp_path / "x.patch", baseline.patch(changes, tmp_path))
    git(tmp_path, "apply", "x.patch")
    assert baseline.load(known) == new
    assert baseline.load(fresh) == old


def test_the_patch_applies_where_a_name_holds_other_line_ends(factory, tmp_path):
    old = factory.baseline_of(factory.baseline_nights(1), CASE)
    odd = {**old.identity, "model": "a\u2028b\x85c"}
    before = baseline.dump(dataclasses.replace(old, identity=odd))
    after = baseline.dump(dataclasses.replace(old, identity={**odd, "revision": "r2"}))
    path = tmp_path / "b.json"
    path.write_bytes(before.encode())
    git(tmp_path, "init", "-q")
    (tmp_path / "x.patch").write_bytes(baseline.patch([(path, before, after)], tmp_path).encode())
    git(tmp_path, "apply", "x.patch")
    assert path.read_bytes() == after.encode()


def test_nothing_changed_is_an_empty_patch(stored, tmp_path):
    text = baseline.dump(stored)
    assert baseline.patch([(tmp_path / "b.json", text, text)], tmp_path) == ""


ODD = ["x" * 300, "a/b|c:d", "../../etc/passwd", "modèle/日本語|x", ".", "", "a b", "A" * 300 + "é"]


@pytest.mark.parametrize("name", ODD)
def test_case_28_no_name_makes_a_bad_file_name(tmp_path, name):
    path = baseline.path_of(tmp_path, name, Case(name, name, "w", "c1"))
    assert path.parent.parent == tmp_path
    assert max(len(part.encode()) for part in path.relative_to(tmp_path).parts) <= 255
    assert set(slug(name)) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_."
    )


def test_case_28_different_names_have_different_files():
    assert len({slug(name) for name in ODD}) == len(ODD)


def test_case_28_the_file_keeps_the_full_name(stored, tmp_path):
    named = dataclasses.replace(stored, identity={**stored.identity, "model": ODD[3]})
    path = write(tmp_path / "b.json", baseline.dump(named))
    assert baseline.load(path).identity["model"] == ODD[3]


def test_case_28_an_address_in_an_engine_s_name_is_refused(tmp_path):
    text = '[engine."<pkg.Engine object at 0x7f00aa000010>"]\nkind = "fake"\n[workload.w]\n'
    path = write(tmp_path / "s.toml", text + "concurrency = [1]\n")
    with pytest.raises(SuiteError, match="names use a-z"):
        load(path)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with a folder `some where` in it, which is the current one."""
    git(tmp_path, "init", "-q")
    folder = tmp_path / "some where"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return tmp_path


@pytest.mark.parametrize("root", ["baselines", "deep/er/base lines", "./baselines", "{here}/b"])
def test_the_patch_applies_where_it_was_made_for_any_folder_of_baselines(factory, repository, root):
    """In a folder below the repository's top, for new files and for known ones."""
    here = repository / "some where"
    root = Path(root.format(here=here))
    for count in (1, 2):
        night = factory.baseline_nights(count)[-1]
        changes, _ = proposal.propose(night, root)
        assert len(changes) == 4
        write(repository / "x.patch", baseline.patch(changes, Path()))
        git(here, "apply", "../x.patch")
        stored = baseline.load(baseline.path_of(root, night.machine.device, CASE))
        assert stored.cells["ttft_p50"].num_nights == count


def test_baselines_above_the_current_folder_are_refused(factory, repository):
    changes, _ = proposal.propose(factory.make_night(), Path("../baselines"))
    with pytest.raises(baseline.BaselineError, match=r"not below .*start in a folder above"):
        baseline.patch(changes, Path())


def proposed(night, root):
    """Return the metrics proposed per case name, and the lines."""
    changes, lines = proposal.propose(night, root)
    cells = {path.name.split("-fake")[0]: json.loads(new)["cells"] for path, _, new in changes}
    return {name: set(found) for name, found in cells.items()}, lines


GATED = set(BaselineGate().metrics)


def test_what_failed_its_limit_is_left_out_by_name(factory, tmp_path):
    limits = (Limit("ttft_p50", engine="b", over="a", max=1.05),)
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.2)}
    night = factory.make_night(speeds, suite=factory.make_suite(limits=limits))
    found, lines = proposed(night, tmp_path)
    assert found["a-w32_16-c4"] == GATED
    assert found["b-w32_16-c4"] == GATED - {"ttft_p50"}
    (line,) = [line for line in lines if line.startswith("b-w32_16-c4")]
    assert "2 launches over 1 nights; left out: ttft_p50 (LIMIT: 1.200 of a's" in line


def store(night, root):
    for path, _, new in proposal.propose(night, root)[0]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8")


def test_a_regression_never_becomes_the_standard(factory, tmp_path):
    for night in factory.baseline_nights():
        store(night, tmp_path)
    slow = factory.make_night({"a": factory.Speed(), "b": factory.Speed(slower=0.2)}, night="slow")
    found, lines = proposed(slow, tmp_path)
    assert {name[0] for name in found} == {"a"}
    (line,) = [line for line in lines if line.startswith("b-w32_16-c4")]
    assert line.startswith("b-w32_16-c4: not proposed; left out: output_throughput (REGRESSION: ")
    # Whoever wants it deletes the file, and starts anew.
    baseline.path_of(tmp_path, slow.machine.device, CASE).unlink()
    assert proposed(slow, tmp_path)[0]["b-w32_16-c4"] == GATED


def test_another_thing_is_never_mixed_into_what_is_stored(factory, tmp_path):
    store(factory.make_night(), tmp_path)
    found, lines = proposed(factory.make_night(night="n2", revision="r2"), tmp_path)
    assert not found
    assert all("INCOMPATIBLE: another thing was measured: revision: r1 → r2" in x for x in lines)


def test_an_engine_that_fails_miscounts_or_is_wrong_is_not_proposed_at_all(factory, tmp_path):
    speeds = {"a": factory.Speed(), "b": factory.Speed(fails=1, salt=1)}
    found, lines = proposed(factory.make_night(speeds), tmp_path)
    assert {name[0] for name in found} == {"a"}
    assert any("b-w32_16-c4: not proposed, LIMIT b-w32_16-c4 success_rate" in x for x in lines)
    wrong = factory.verified(factory.make_night(speeds), first_wrong=1)
    assert {name[0] for name in proposed(wrong, tmp_path)[0]} <= {"a"}
    night = factory.make_night()
    miscounted = tuple(
        dataclasses.replace(
            run, records=tuple(dataclasses.replace(r, prompt_tokens=1) for r in run.records)
        )
        if run.case == CASE
        else run
        for run in night.runs
    )
    found, lines = proposed(dataclasses.replace(night, runs=miscounted), tmp_path)
    assert set(found) == {"a-w32_16-c1", "a-w32_16-c4", "b-w32_16-c1"}
    assert any("b-w32_16-c4: not proposed, LIMIT b-w32_16-c4 token_accuracy" in x for x in lines)


def test_a_launch_that_is_missing_is_not_proposed(factory, tmp_path):
    night = factory.make_night()
    runs = tuple(r for r in night.runs if (r.case, r.launch) != (CASE, 1))
    found, lines = proposed(dataclasses.replace(night, runs=runs), tmp_path)
    assert "b-w32_16-c4" not in found
    assert any("b-w32_16-c4: not proposed, MISSING" in line for line in lines)


def test_a_unit_of_every_metric_may_be_stored():
    assert {metric.unit for metric in metrics.ALL.values()} <= set(baseline.UNITS)
