"""The check for a bare GPU machine, run whole on a CPU with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Two that take seconds, and one that nobody has.
ENGINES = "continuous,hf_naive,nothing"


def test_it_runs_whole_on_a_cpu(tmp_path):
    words = ["--device", "cpu", "--models", "synthetic:tiny", "--engines", ENGINES]
    words += ["--levels", "1,4,16", "--prompt-tokens", "12", "--output-tokens", "6"]
    words += ["--cell-seconds", "5", "--json", str(tmp_path / "said.json")]
    words += ["--minutes", "30"]  # however busy the machine is
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu_check"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "said.json").read_text()) == said
    rows = {(row["engine"], row["concurrency"]): row for row in said["rows"]}
    assert set(rows) == {
        *(("continuous", n) for n in (1, 4, 16)),
        *(("hf_naive", n) for n in (1, 4)),  # further on it is as fast
        *(("nothing", n) for n in (1, 4, 16)),
    }
    for (engine, _), row in rows.items():
        if engine == "nothing":
            assert "there is no engine kind 'nothing'" in row["error"]
            assert row["output_tokens_per_s"] is None
            continue
        assert row["error"] is None
        assert row["output_tokens_per_s"] > 0
        assert row["ratio_to_hf_naive"] > 0
    tokens = {(one["engine"], one["dtype"]): one for one in said["tokens"]}
    for engine in ("continuous", "hf_naive"):
        assert [tokens[engine, dtype]["wrong"] for dtype in ("float32", "bfloat16")] == [0, 0]
    assert "nothing" in tokens["nothing", "float32"]["error"]
    assert said["rates"]["bandwidth_bytes_per_s"] > 1e8
    assert rows["continuous", 1]["bandwidth_share"] > 0
