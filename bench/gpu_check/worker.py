"""One engine, in a process of its own: its tokens first, then its speed, model by model.

    python engines/boot.py gpu_check.worker '{"engine": …, …}'     (with bench/ in PYTHONPATH)

A line of JSON for each thing found out: a process that is ended loses only what was to come.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from engines.weights import step_bytes
from in_process import closed_loop, decode_split, prompts, warm_up

from gpu_check import busy, correct
from headway.engines.contract import Engine
from headway.engines.host.loop import find_engine
from headway.engines.models import ModelFolder, default_home, prepare

SPLIT_TOKENS, SEED = 24, 11
# What one cell, one build or one more look at an engine must have left to be begun.
LEAST_S = 5.0
FAILURES = (RuntimeError, ValueError, ImportError, AssertionError, TypeError)
Say = Callable[..., None]


def main(text: str) -> int:
    """Do all that the JSON asks for, within its seconds."""
    asked: Mapping[str, Any] = json.loads(text)
    until_s = time.monotonic() + asked["limit_s"]

    def say(what: str, **facts: Any) -> None:
        line = {"what": what, "engine": asked["engine"], **facts}
        sys.stdout.write(json.dumps(line, allow_nan=False, default=str) + "\n")
        sys.stdout.flush()

    for dtype in ("float32", "bfloat16"):
        _note(asked, f"tokens in {dtype}")
        try:
            say("tokens", **correct.check(_builder(asked), asked["device"], dtype))
        except FAILURES as error:
            say("tokens", dtype=dtype, error=_first_line(error))
        _free(asked["device"])
    for model in asked["models"]:
        _speeds(asked, model, until_s, say)
        _free(asked["device"])
    return 0


def _speeds(asked: Mapping[str, Any], name: str, until_s: float, say: Say) -> None:
    """Measure every level of a model; what fails or has no time left is said."""
    if until_s - time.monotonic() < LEAST_S:
        for level in asked["levels"]:
            say("cell", model=name, concurrency=level, skipped="no time left")
        return
    try:
        _note(asked, f"loading {name}")
        folder = prepare(name, default_home())
        engine = _builder(asked)(folder, asked["dtype"])
    except FAILURES as error:
        for level in asked["levels"]:
            say("cell", model=name, concurrency=level, error=_first_line(error))
        return
    config = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    info = engine.info
    say("built", model=name, settings=dict(info.settings), versions=dict(info.versions))
    say("weights", model=name, step_bytes=step_bytes(config, asked["dtype"]))
    given = prompts(folder, asked["prompt_tokens"], SEED)
    for level in asked["levels"]:
        left_s = until_s - time.monotonic()
        cell: dict[str, Any] = {"model": name, "concurrency": level}
        if left_s < LEAST_S:
            say("cell", **cell, skipped="no time left")
            continue
        _note(asked, f"{name}, {level} in flight")
        try:
            say("cell", **cell, **_cell(asked, engine, given, level, left_s))
        except FAILURES as error:
            say("cell", **cell, error=_first_line(error))
    del engine
    _free(asked["device"])
    if asked["kind"] == "paged" and name == asked["models"][0]:
        _profile(asked, folder, given, until_s, say)


def _cell(
    asked: Mapping[str, Any],
    engine: Engine,
    given: Iterator[tuple[int, ...]],
    level: int,
    left_s: float,
) -> dict[str, Any]:
    if asked["device"] != "cpu":
        torch.cuda.reset_peak_memory_stats()
    limit_s = min(asked["cell_s"], left_s)
    before = dict(engine.stats())
    warm_up(engine, given, level)
    served = closed_loop(engine, given, asked["output_tokens"], level, limit_s)
    after = dict(engine.stats())
    found: dict[str, Any] = {
        "output_tokens_per_s": served.tokens_per_s,
        "tpot_p50_s": served.tpot_p50_s,
        "ended": served.ended,
        "window_s": served.window_s,
        "cut": served.cut,
    }
    grown = {name: total - before.get(name, 0) for name, total in after.items()}
    found["most_rows"] = after.get("most_rows")
    held, filled = (grown.get(f"kv_{name}_total") for name in ("held", "filled"))
    found["kv_waste"] = 1 - filled / held if held and filled is not None else None
    for name in ("preemptions", "chunked"):
        found[name] = grown.get(f"{name}_total")
    if asked["device"] != "cpu":
        found["gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
    return found | _alone(asked["device"], engine, given, level)


def _alone(
    device: str, engine: Engine, given: Iterator[tuple[int, ...]], rows: int
) -> dict[str, Any]:
    """Return what a decode step takes alone, and in which share of it the GPU waits for the host.

    None for an engine that does not decode so many together.
    """
    nothing = {"decode_step_s": None, "gpu_busy_s": None, "host_share": None}
    try:
        plain = decode_split(engine, given, SPLIT_TOKENS, rows)
    except RuntimeError:
        return nothing
    if device == "cpu":
        return nothing | {"decode_step_s": plain.wall_s}
    watch = busy.Watch()
    watched = decode_split(engine, given, SPLIT_TOKENS, rows, watch.around)
    # The step that ends the first sequence is watched as well, but not counted.
    busy_s = None if watch.busy_s is None else watch.busy_s / (watched.steps + 1)
    known = busy_s is not None and plain.wall_s
    share = max(0.0, 1 - busy_s / plain.wall_s) if known else None
    return {"decode_step_s": plain.wall_s, "gpu_busy_s": busy_s, "host_share": share}


def _profile(
    asked: Mapping[str, Any],
    folder: ModelFolder,
    given: Iterator[tuple[int, ...]],
    until_s: float,
    say: Say,
) -> None:
    """Ask an engine of ours where its steps go, in a launch of its own: telling costs it speed."""
    if until_s - time.monotonic() < 2 * LEAST_S:
        return
    _note(asked, "where steps go")
    try:
        engine = _builder({**asked, "args": {**asked["args"], "profile": True}})(
            folder, asked["dtype"]
        )
        for rows in [level for level in asked["levels"] if level <= 32]:
            warm_up(engine, given, rows)
            split = decode_split(engine, given, SPLIT_TOKENS, rows)
            say("split", model=folder.name, **split.told())
    except FAILURES as error:
        say("split", model=folder.name, error=_first_line(error))


def _builder(asked: Mapping[str, Any]) -> Callable[[ModelFolder, str], Engine]:
    def build(folder: ModelFolder, dtype: str) -> Engine:
        made: Engine = find_engine(asked["kind"])(folder, dtype, asked["device"], **asked["args"])
        return made

    return build


def _free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _note(asked: Mapping[str, Any], text: str) -> None:
    sys.stderr.write(f"{asked['engine']}: {text}\n")
    sys.stderr.flush()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
