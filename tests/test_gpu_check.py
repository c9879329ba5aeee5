"""bench/gpu_check: what workers said becomes rows, and what nobody said stays unknown."""

from __future__ import annotations

import json
from typing import Any

import gpu_check
import gpu_check.correct
import gpu_check.gathered
import gpu_check.table
import pytest

from headway.engines.models.scores import Scores

ENGINES = {"graphs": [1, 8, 32], "hf_naive": [1, 8]}
MODEL = "synthetic:qwen2.5_1.5b"
RATES = {"bandwidth_bytes_per_s": 4e12, "matrix_flops": 6e14}


def cell(engine: str, concurrency: int, tokens_per_s: float, **facts: Any) -> dict[str, Any]:
    place = {"what": "cell", "engine": engine, "model": MODEL, "concurrency": concurrency}
    return place | {"output_tokens_per_s": tokens_per_s, "tpot_p50_s": 1 / tokens_per_s} | facts


def gathered(said: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    given = {"models": [MODEL], "levels": ENGINES, "rates": RATES, "ended": {}} | changes
    return gpu_check.gathered.gather(said, **given)


def row(found: dict[str, Any], engine: str, concurrency: int) -> dict[str, Any]:
    (one,) = [r for r in found["rows"] if (r["engine"], r["concurrency"]) == (engine, concurrency)]
    return one


SAID = [
    {"what": "weights", "engine": "graphs", "model": MODEL, "step_bytes": 3_000_000_000},
    cell("graphs", 1, 1000.0, host_share=0.05),
    cell("graphs", 8, 4000.0, host_share=0.02),
    cell("graphs", 32, 9000.0),
    cell("hf_naive", 1, 40.0),
    cell("hf_naive", 8, 50.0),
]


def test_ratios_and_shares_are_those_of_the_cells():
    found = gathered(SAID)
    assert [row(found, "graphs", n)["ratio_to_hf_naive"] for n in (1, 8, 32)] == [25, 80, 180]
    assert row(found, "graphs", 1)["bandwidth_share"] == pytest.approx(0.75)
    assert row(found, "graphs", 8)["bandwidth_share"] is None
    goals = gpu_check.gathered.goals(found["rows"], "cuda")
    assert [goal["met"] for goal in goals] == [True, True, True, True]
    assert gpu_check.gathered.goals(found["rows"], "cpu") == []


def test_a_slow_engine_misses_its_goals():
    slow = [SAID[0], cell("graphs", 1, 60.0, host_share=0.8), cell("hf_naive", 1, 40.0)]
    goals = gpu_check.gathered.goals(gathered(slow)["rows"], "cuda")
    assert [goal["met"] for goal in goals] == [False, None, False, False]


def test_a_cell_that_nobody_spoke_of_says_why_and_is_none():
    found = gathered(SAID[:2], ended={"hf_naive": "its process ended with exit status 1"})
    naive, ours = row(found, "hf_naive", 8), row(found, "graphs", 8)
    assert naive["skipped"] == "its process ended with exit status 1"
    assert ours["skipped"] == "its process said nothing of it"
    figures = ("output_tokens_per_s", "tpot_p50_s", "ratio_to_hf_naive", "bandwidth_share")
    assert all(one[name] is None for one in (naive, ours) for name in figures)


def test_a_cell_of_no_tokens_has_no_ratio():
    said = [cell("graphs", 1, 1000.0), cell("hf_naive", 1, 40.0)]
    said[1]["output_tokens_per_s"] = None
    assert row(gathered(said), "graphs", 1)["ratio_to_hf_naive"] is None


def test_the_table_says_everything_and_makes_nothing_up():
    tokens = [
        {"what": "tokens", "engine": "graphs", "dtype": "float32", "error": "no such engine"},
        *(
            {"what": "tokens", "engine": "graphs", "dtype": d, "outputs": 16, "wrong": 1}
            | {"first_wrong": "prompt of 12 tokens: token 3 is not the best one"}
            for d in ("bfloat16",)
        ),
    ]
    found = gathered([*tokens, *SAID[:2]], rates={}, ended={"hf_naive": "no time left"})
    found |= {"device_name": "Some GPU", "torch": None, "seconds": 12.0}
    found["goals"] = gpu_check.gathered.goals(found["rows"], "cuda")
    text = gpu_check.table.render(found)
    for said in ("no such engine", "15 of 16", "token 3 is not", "no time left", "not measured"):
        assert said in text
    (line,) = [one for one in text.splitlines() if "hf_naive" in one and one.startswith("8")]
    assert line.split()[2:4] == ["—", "—"]
    json.dumps(found, allow_nan=False)


def scores(*gaps: float, best: tuple[int, ...] = ()) -> Scores:
    count = len(gaps)
    return Scores(list(gaps), [0] * count, [1.0] * count, list(best), [0.0] * count)


def test_a_wrong_token_is_found():
    size = gpu_check.correct.OUTPUT_TOKENS
    output, fine = tuple(range(size)), scores(*[0.0] * size, best=tuple(range(size)))
    wrong_in = gpu_check.correct.wrong_in
    assert wrong_in(fine, output, "float32") is None
    assert (
        wrong_in(fine, (*output[:5], 99, *output[6:]), "float32") == "token 5 is not the best one"
    )
    near = scores(*[0.0] * (size - 1), 0.2, best=output)
    assert wrong_in(near, output, "bfloat16") is None
    far = scores(*[0.0] * (size - 1), 0.3, best=output)
    assert wrong_in(far, output, "bfloat16") == "a token is 0.30 below the best"
    assert wrong_in(fine, output[:-1], "bfloat16") == f"{size - 1} tokens instead of {size}"
