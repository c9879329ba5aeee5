"""An engine that ran out of memory is called so, is no regression, and costs nobody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headway.engines import endpoint
from headway.engines.endpoint import oom_kills
from headway.engines.fake import MODEL
from headway.engines.launch import LaunchError, LaunchSpec, launched
from headway.engines.supervise import descendants

WORDS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA error: out of memory",
    "ValueError: No available memory for the cache blocks. Try increasing it.",
    "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
    "ggml_backend_cuda_buffer_type_alloc_buffer: failed to allocate CUDA0 buffer",
    "MemoryError",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "OSError: [Errno 12] Cannot allocate memory",
]


def spec(tmp_path: Path, *lines: str) -> LaunchSpec:
    """An engine that is a few lines of shell."""
    planted = tmp_path / "python"
    planted.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    planted.chmod(0o755)
    log = tmp_path / "engine.log"
    return LaunchSpec("a", "fake", MODEL, "float32", "cpu", planted, log, start_timeout_s=20.0)


def failure(launch: LaunchSpec) -> LaunchError:
    with pytest.raises(LaunchError) as caught, launched(launch):
        pass
    assert descendants(os.getpid()) == []
    return caught.value


@pytest.mark.parametrize("words", WORDS)
def test_the_last_words_say_so(tmp_path, words):
    error = failure(spec(tmp_path, f'echo "{words}"', "echo and an end of its own", "exit 1"))
    assert error.kind == "oom"
    assert str(error).startswith("a ran out of memory while it was loading: ")
    assert words[:30] in str(error)


@pytest.mark.parametrize(
    "words",
    ["killed", "there is no memory of it", "RuntimeError: planted", "out of cheese"],
)
def test_other_words_do_not(tmp_path, words):
    error = failure(spec(tmp_path, f'echo "{words}"', "exit 1"))
    assert error.kind == "died_loading"
    assert "a ended while it was loading" in str(error)


def test_words_long_before_the_end_are_not_the_last(tmp_path):
    error = failure(spec(tmp_path, "echo out of memory, so I use less", "seq 100", "exit 1"))
    assert error.kind == "died_loading"


@pytest.mark.parametrize(
    ("counts", "status", "kind"),
    [
        ([3, 4], "kill -9 $$", "oom"),  # the kernel counts what it kills
        ([3, 4], "exit 1", "oom"),  # a worker of it was killed, and it ended after that
        ([3, 3], "kill -9 $$", "died_loading"),  # a person did that
        ([None], "kill -9 $$", "oom"),  # nobody here did it, and nobody else says so
        ([None], "exit 1", "died_loading"),
    ],
)
def test_a_kill_that_nobody_asked_for(tmp_path, monkeypatch, counts, status, kind):
    said = list(counts)
    monkeypatch.setattr(endpoint, "oom_kills", lambda: said.pop(0) if len(said) > 1 else said[0])
    assert failure(spec(tmp_path, status)).kind == kind


@pytest.mark.parametrize(("text", "count"), [("a 1\noom_kill 7\nb 2\n", 7), ("a 1\n", None)])
def test_the_kernel_s_count_is_read(tmp_path, text, count):
    (tmp_path / "vmstat").write_text(text)
    assert oom_kills(tmp_path) == count
    assert oom_kills(tmp_path / "none") is None


def test_case_32_a_constructor_without_memory_costs_its_own_engine_only(workspace: Any) -> None:
    """Through the command: MISSING with the reason, never SLOWER; the other is measured."""
    (workspace.folder / "greedy.py").write_text(
        "class Engine:\n"
        "    def __init__(self, *given, **named):\n"
        "        raise RuntimeError('CUDA out of memory. Tried to allocate 60.00 GiB')\n"
    )
    workspace.write(
        more='\n[engine.greedy]\nkind = "greedy:Engine"\nstart_timeout_s = 20\n'
        "[baseline]\nmetrics = []\n"
    )
    done = workspace.run("run", "mini", "--set", "workload.w.concurrency=[1]", "--set", "limit=[]")
    assert done.code == 1
    records = {record["instance"]: record for record in done.journal("launch")}
    assert records["greedy"]["failure_kind"] == "oom"
    assert "greedy ran out of memory while it was loading" in records["greedy"]["failure"]
    assert records["fake_a"]["failure"] is None
    said: dict[str, set[str]] = {}
    for cell in done.report()["cells"]:
        said.setdefault(cell["instance"], set()).add(cell["verdict"])
    assert said["greedy"] == {"MISSING"}
    assert said["fake_a"] <= {"PASS"}
    assert said["fake_b"] <= {"PASS"}
