from __future__ import annotations

import dataclasses
import json
import math
import random
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from headway import baseline, codec, metrics
from headway.core import Case
from headway.fingerprint import Treatment, slug
from headway.suite import SuiteError, load

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
        ('{"schema": 3}', "has schema 3; this Headway reads up to 2: upgrade Headway"),
        ('{"schema": true}', "has schema True; this Headway reads 1 to 2"),
        ('{"schema": 2}', r"baseline\.identity is missing"),
        ('{"schema": 1}', r"baseline\.identity is missing"),
        ('{"schema": 1, "nights": {}}', "nights is not known in schema 1"),
        ('{"schema": 2, "schema": 2}', "'schema' stands twice in one table"),
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


def test_merge_adds_a_night_and_the_same_one_only_once(factory):
    nights = factory.baseline_nights(3)
    stored = factory.baseline_of(nights, CASE)
    assert stored.cells["ttft_p50"].num_nights == 3
    assert len(stored.cells["ttft_p50"].samples) == 6
    again = baseline.merge(stored, factory.baseline_of(nights[2:], CASE))
    assert again == stored
    assert baseline.merge(None, stored) == stored


@pytest.mark.parametrize("field", ["identity", "environment"])
def test_a_new_epoch_drops_what_was_measured_in_the_old_one(factory, field):
    first, second = factory.baseline_nights(2)
    old = factory.baseline_of([first], CASE)
    other = dataclasses.replace(old, **{field: {**getattr(old, field), "cpu": "another"}})
    new = factory.baseline_of([second], CASE)
    for merged in (baseline.merge(other, new), baseline.merge(new, other)):
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


def test_a_unit_of_every_metric_may_be_stored():
    assert {metric.unit for metric in metrics.ALL.values()} <= set(baseline.UNITS)


def test_a_sample_is_a_line_and_so_is_what_is_known_of_a_night(stored):
    lines = baseline.dump(stored).splitlines()
    samples = [json.loads(line.strip().rstrip(",")) for line in lines if '"value":' in line]
    cells = stored.cells.values()
    assert len(samples) == sum(len(cell.samples) for cell in cells) == 12
    assert all(set(sample) == {"launch", "night", "value"} for sample in samples)
    kernels = [line for line in lines if '"calibration":' in line]
    assert len(kernels) == 2
    assert json.loads(baseline.dump(stored)) == json.loads(json.dumps(codec.encode(stored)))


def as_schema_1(stored):
    data = codec.encode(stored)
    del data["nights"]
    return json.dumps(data | {"schema": 1})


def test_schema_1_is_still_read_and_gates(stored, tmp_path):
    old = baseline.load(write(tmp_path / "b.json", as_schema_1(stored)))
    assert old.cells == stored.cells
    assert not old.nights
    assert baseline.parse(baseline.dump(old), "again") == old
    assert '"schema": 2' in baseline.dump(old)
    # What the newer file knows of a night is kept when the two are merged.
    assert baseline.merge(old, stored).nights == baseline.merge(stored, old).nights == stored.nights


def test_case_24_the_same_launch_twice_is_an_error(stored, tmp_path):
    def edit(data):
        samples = data["cells"]["ttft_p50"]["samples"]
        samples.append(dict(samples[0]))

    path = write(tmp_path / "b.json", edited(stored, edit))
    with pytest.raises(baseline.BaselineError, match=r"holds launch 1 of night .* 2 times"):
        baseline.load(path)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf])
def test_a_calibration_that_takes_no_time_is_refused(stored, tmp_path, seconds):
    def edit(data):
        next(iter(data["nights"].values()))["calibration"]["matmul"] = seconds

    path = write(tmp_path / "b.json", edited(stored, edit))
    with pytest.raises(baseline.BaselineError, match="takes no time"):
        baseline.load(path)


VALUES = st.floats(0.01, 10.0)
# Both sides know the same value of the same launch, unless a test says otherwise.
TRUTH = st.fixed_dictionaries(
    {(m, n, k): VALUES for m in "ab" for n in ("n1", "n2") for k in (1, 2)}
)


@st.composite
def sides(draw):
    """Three files: what two branches began with and what each made of it."""
    truth = draw(TRUTH)
    chosen = [draw(st.sets(st.sampled_from(sorted(truth)))) for _ in range(3)]
    return [of_samples({key: truth[key] for key in keys}) for keys in chosen]


def of_samples(samples):
    cells = {}
    for (metric, night, launch), value in sorted(samples.items()):
        cells.setdefault(metric, []).append(baseline.Stored(night, launch, value))
    nights = {night: baseline.NightFacts(f"2026-11-0{night[1]}") for _, night, _ in samples}
    return baseline.Baseline(
        baseline.SCHEMA,
        {"instance": "x"},
        {"cpu": "y"},
        Treatment("fake", "1"),
        {metric: baseline.Cell("s", "lower", tuple(found)) for metric, found in cells.items()},
        dict(sorted(nights.items())),
    )


def keys_of(stored):
    return {(m, s.night, s.launch) for m, cell in stored.cells.items() for s in cell.samples}


@given(sides())
def test_merging_is_a_union_whichever_side_comes_first(three):
    a, b, c = three
    merged = baseline.merge(a, b)
    assert merged == baseline.merge(b, a)
    assert keys_of(merged) == keys_of(a) | keys_of(b)
    assert baseline.merge(merged, a) == merged
    assert baseline.merge(baseline.merge(a, b), c) == baseline.merge(a, baseline.merge(b, c))
    assert baseline.parse(baseline.dump(merged), "merged") == merged


@given(sides())
def test_with_what_both_began_with_what_either_dropped_stays_dropped(three):
    base, a, b = three
    merged = baseline.merge(a, b, base)
    assert merged == baseline.merge(b, a, base)
    both, either, old = (
        keys_of(a) & keys_of(b),
        keys_of(a) | keys_of(b),
        keys_of(base),
    )
    assert keys_of(merged) == both | (either - old)


@given(sides(), st.booleans())
def test_one_launch_with_two_values_is_one_clear_error(three, flip):
    _, a, b = three
    samples = dict.fromkeys(keys_of(a) & keys_of(b), 1.0)
    if not samples:
        return
    key = sorted(samples)[0]
    one, other = of_samples(samples), of_samples({**samples, key: 2.0})
    with pytest.raises(
        baseline.BaselineError, match=r"is [12] in one and [12] in the other"
    ) as told:
        baseline.merge(*((one, other) if flip else (other, one)))
    assert key[0] in str(told.value)
    assert "\n" not in str(told.value)


def test_two_epochs_of_the_same_night_and_two_units_cannot_be_merged(stored):
    other = dataclasses.replace(stored, environment={"cpu": "another"})
    with pytest.raises(baseline.BaselineError, match="neither is the newer"):
        baseline.merge(stored, other)
    with pytest.raises(baseline.BaselineError, match="newest night is the same one"):
        baseline.merge(stored, dataclasses.replace(stored, treatment=Treatment("fake", "2")))
    cell = dataclasses.replace(stored.cells["ttft_p50"], unit="1")
    odd = dataclasses.replace(stored, cells={**stored.cells, "ttft_p50": cell})
    with pytest.raises(baseline.BaselineError, match="ttft_p50 has two units"):
        baseline.merge(stored, odd)


def test_the_treatment_is_that_of_the_newest_night(factory):
    first, second = factory.baseline_nights(2)
    old = factory.baseline_of([first], CASE)
    new = dataclasses.replace(
        factory.baseline_of([second], CASE), treatment=Treatment("fake", "2.0")
    )
    assert baseline.merge(old, new).treatment == baseline.merge(new, old).treatment
    assert baseline.merge(old, new).treatment.version == "2.0"


def nights_of(*medians):
    return [[value * 0.99, value, value * 1.01] for value in medians]


def test_halves_that_lie_apart_disagree_and_noise_does_not():
    steady = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99]
    assert not baseline.halves(nights_of(*steady), 0.03).disagree
    step = [1.0, 1.01, 0.99, 1.10, 1.11, 1.09]
    found = baseline.halves(nights_of(*step), 0.03)
    assert found.disagree
    assert found.change == pytest.approx(0.10, abs=0.005)
    # Their own spread explains as much, or it is no more than is granted.
    assert not baseline.halves(nights_of(0.8, 1.1, 0.9, 1.2, 0.95, 1.15), 0.03).disagree
    assert not baseline.halves(nights_of(1.0, 1.0, 1.0, 1.02, 1.02, 1.02), 0.03).disagree
    creep = [1.0, 1.04, 1.08, 1.12, 1.16, 1.20, 1.24, 1.28, 1.32, 1.36]
    assert baseline.halves(nights_of(*creep), 0.03).disagree
    assert baseline.halves(nights_of(1.0), 0.03) is None
    assert not baseline.halves(nights_of(1.0, 2.0), 0.03).disagree


def test_halves_that_are_alike_are_rarely_told_apart():
    draw, refused, rounds = random.Random(3), 0, 1000
    for _ in range(rounds):
        nights = [[draw.lognormvariate(0, 0.03)] for _ in range(6)]
        refused += baseline.halves(nights, 0.0).disagree
    assert refused <= binom.ppf(0.999, rounds, baseline.HALVES)


DRIVER = "merge.headway.driver"


def test_git_merges_two_branches_with_it_as_its_driver(factory, tmp_path):
    """Branches that accept different nights, and one that accepts a new standard."""
    nights = factory.baseline_nights(4)
    path = tmp_path / "baselines" / "d" / "b.json"
    path.parent.mkdir(parents=True)
    command = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())"]
    git(tmp_path, "init", "-q", "-b", "main")
    driver = f"{shlex.join(command)} baseline merge %A %B --base %O"
    git(tmp_path, "config", DRIVER, driver)
    write(tmp_path / ".gitattributes", "baselines/**/*.json merge=headway\n")

    def commit(branch, stored):
        write(path, baseline.dump(stored))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", branch)

    commit("main", factory.baseline_of(nights[:2], CASE))
    git(tmp_path, "checkout", "-qb", "one")
    commit("one", factory.baseline_of(nights[:3], CASE))
    git(tmp_path, "checkout", "-q", "main")
    commit("two", factory.baseline_of([*nights[:2], nights[3]], CASE))
    git(tmp_path, "merge", "-q", "--no-edit", "one")
    assert baseline.load(path) == factory.baseline_of(nights, CASE)
    git(tmp_path, "checkout", "-qb", "three", "HEAD~1")
    commit("three", factory.baseline_of(nights[2:], CASE))
    # Now both sides say something of night 4, and one of them dropped the first two.
    git(tmp_path, "merge", "-q", "--no-edit", "one")
    assert baseline.load(path) == factory.baseline_of(nights[2:], CASE)
