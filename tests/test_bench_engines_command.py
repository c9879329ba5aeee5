"""bench/engines: the command that measures, and a night that it reads again."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines.goals
import engines.rows
import engines.work
import pytest

from headway import suite

ROOT = Path(__file__).resolve().parent.parent
LADDER = ROOT / "perf_tests" / "suites" / "ladder.toml"


def row(found: list[dict[str, Any]], engine: str, concurrency: int) -> dict[str, Any]:
    (one,) = [r for r in found if (r["engine"], r["concurrency"]) == (engine, concurrency)]
    return one


def options(**changes: Any) -> engines.work.Options:
    given = {"suite": "ladder", "folder": Path("r"), "engines": ("hf_naive", "graphs")}
    given |= {"workloads": ("w128_64", "mixture"), "levels": (1, 8, 32), "launches": 5}
    return engines.work.Options(**(given | changes))


def after(words: list[str], flag: str) -> list[str]:
    return [value for name, value in itertools.pairwise(words) if name == flag]


def test_the_suite_takes_what_the_command_sets():
    words = engines.work.command(options(model="synthetic:tiny", dtype="float32", scale=0.5))
    loaded = suite.load(LADDER, after(words, "--set"))
    assert (loaded.launches, loaded.instances[0].model) == (5, "synthetic:tiny")
    assert {i.dtype for i in loaded.instances} == {"float32"}
    assert [[lv.name for lv in w.levels] for w in loaded.workloads] == [["c1", "c8", "c32"]] * 2
    assert after(words, "--engine") == ["hf_naive", "graphs"]


def test_hf_naive_goes_no_further_than_it_must():
    (chosen,) = after(engines.work.command(options()), "-k")
    assert chosen == "(test_measure or w128_64 or mixture) and not (hf_naive and (c32))"
    for free in (options(naive_everywhere=True), options(levels=(1, 8)), options(levels=(1, 32))):
        assert "not" not in after(engines.work.command(free), "-k")[0].split()


def test_the_shipped_suite_has_every_engine_of_the_benchmark():
    loaded = suite.load(LADDER)
    names = {instance.name: instance for instance in loaded.instances}
    rungs = ("continuous", "paged", "chunked", "fused32", "flash32", "graphs")
    assert all(names[rung].args["rung"] == rung for rung in rungs)
    arms = (*engines.rows.VLLM_ARMS, engines.rows.VLLM_EQUAL)
    assert all(names[arm].optional for arm in arms)
    assert engines.rows.NAIVE in names
    assert engines.goals.WORKLOAD in {workload.name for workload in loaded.workloads}


FAKE = """
[suite]
model = "fake"
calibrate = false

[budget]
night_minutes = 2

[baseline]
metrics = []

[engine.hf_naive]
kind = "fake"
args = { ttft_s = 0.04, itl_s = 0.016 }

[engine.graphs]
kind = "fake"
args = { ttft_s = 0.02, itl_s = 0.008 }

[engine.vllm]
kind = "fake"
python = "/not/there/python"
optional = true

[workload.w128_64]
prompt_tokens = 8
output_tokens = 8
concurrency = [1]
"""


@pytest.mark.paced
def test_the_command_measures_reads_and_reads_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "fake.toml").write_text(FAKE)
    words = [sys.executable, str(ROOT / "bench" / "engines")]
    given = ["--suite", str(tmp_path / "fake.toml"), "--folder", str(tmp_path / "reports")]
    given += ["--workloads", "w128_64", "--levels", "1,2,12", "--launches", "2", "--no-beside"]
    given += ["--engines", "hf_naive,graphs", "--unverified", "--device", "cpu"]
    done = subprocess.run([*words, *given], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    ours = row(said["rows"], "graphs", 2)
    assert 1.5 < ours["ratio_to_hf_naive"] < 2.5
    assert (ours["n"], ours["outputs_right"], ours["ratio_to_vllm"]) == (2, None, None)
    assert row(said["rows"], "hf_naive", 12)["n"] == 0  # the engine that would take longest
    assert row(said["rows"], "graphs", 12)["hf_naive_level"] == "c2"
    again = subprocess.run(
        [*words, "--night", said["night"], "--engines", "hf_naive,graphs"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(again.stdout.splitlines()[-1])["rows"] == said["rows"]


def test_a_night_that_is_none_is_said(tmp_path):
    words = [sys.executable, str(ROOT / "bench" / "engines"), "--night", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("engines: ")
    assert len(done.stderr.splitlines()) == 1
