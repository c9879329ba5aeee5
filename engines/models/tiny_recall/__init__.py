"""tiny_recall: a small trained Llama that answers from its context, and nothing else.

Its files are committed beside this one, so it needs no network and no conversion. `task` makes
its prompts and knows the right answers; `train` made the weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headway.engines.models.folder import ModelError, ModelFolder, describe
from headway.engines.models.tiny_recall.task import BOS, EOS, PAD, QUERY

NAME = "tiny_recall"
PATH = Path(__file__).resolve().parent


def prepare(revision: str | None = None) -> ModelFolder:
    """Return the committed model; see `headway.engines.models.prepare`."""
    folder = replace(describe(PATH, NAME), special_ids=(BOS, EOS, PAD, QUERY))
    if revision not in (None, folder.revision):
        raise ModelError(f"{NAME} has the revision {folder.revision} only, not {revision!r}")
    return folder
