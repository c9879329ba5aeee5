"""Models by name: fetched, converted or invented once, then a folder that every engine loads.

`prepare` is the only door. Neither it nor this package imports torch; what does is
`loading` (weights), `scoring` (logits), the conversion of SmolLM2 and the training of tiny_recall.
"""

from __future__ import annotations

from pathlib import Path

from headway.engines.models import hub, smollm2, synthetic, tiny_recall
from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.models.store import default_home

__all__ = ["DEFAULT", "ModelError", "ModelFolder", "default_home", "prepare"]

DEFAULT = smollm2.NAME


def prepare(name: str, home: Path, revision: str | None = None) -> ModelFolder:
    """Return the model `name`, made ready in `home` if it is not yet.

    A name is `smollm2_135m`, `tiny_recall`, `synthetic:SHAPE` (its revision is a seed), the path of
    a folder in Hugging Face's layout, or a hub id `org/name` with an optional revision. Safe to
    call from several processes at once. Raises ModelError with a sentence for the user.
    """
    if name == smollm2.NAME:
        return smollm2.prepare(home, revision)
    if name == tiny_recall.NAME:
        return tiny_recall.prepare(revision)
    if name.startswith(synthetic.PREFIX):
        return synthetic.prepare(name, home, revision)
    if hub.looks_local(name):
        return hub.prepare_local(name, revision)
    if hub.looks_remote(name):
        return hub.prepare_remote(name, home, revision)
    raise ModelError(
        f"there is no model {name!r}: name {smollm2.NAME}, {tiny_recall.NAME}, "
        f"{', '.join(synthetic.NAMES)}, the path of a model folder, or a hub id like org/name"
    )
