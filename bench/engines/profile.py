"""Where a decode step of one engine goes, by its own clock, in a process of its own.

    python engines/boot.py engines.profile '{"kind": …, "args": …}'    (with bench/ in PYTHONPATH)

Asking an engine to tell costs it speed, so that no figure of this launch is a speed. One line of
JSON: a split for each number of sequences, or what failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from in_process import decode_split, prompts, warm_up

from headway.engines.host.loop import find_engine
from headway.engines.models import ModelError, default_home, prepare

PROMPT_TOKENS, OUTPUT_TOKENS, SEED = 128, 64, 7


def main(text: str) -> int:
    """Build the engine, split its steps, print them."""
    asked: Mapping[str, Any] = json.loads(text)
    try:
        folder = prepare(asked["model"], default_home())
        build = find_engine(asked["kind"])
        args = {**asked["args"], "profile": True}
        engine = build(folder, asked["dtype"], asked["device"], **args)
    except (ModelError, ValueError, ImportError) as error:
        return _say({"error": str(error)})
    given, splits = prompts(folder, PROMPT_TOKENS, SEED), []
    for rows in asked["rows"]:
        try:
            warm_up(engine, given, rows)
            splits.append(decode_split(engine, given, OUTPUT_TOKENS, rows).told())
        except (RuntimeError, ValueError) as error:
            splits.append({"rows": rows, "error": str(error).splitlines()[0]})
    return _say({"splits": splits})


def _say(answer: Mapping[str, Any]) -> int:
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
