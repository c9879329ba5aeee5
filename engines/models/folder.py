"""What a prepared model is: its folder, and the facts that others need before they load it.

The facts stand in `headway.json`, written last into the folder, so that a second look at a model
needs neither torch nor transformers, and a folder without one is known to be unfinished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MANIFEST = "headway.json"
MANIFEST_SCHEMA = 1
# Spread evenly over each file, so that a change of any layer is seen.
SAMPLES = 256
SAMPLE_BYTES = 1 << 16
HASHED = {".json", ".safetensors", ".bin", ".jinja", ".model"}


class ModelError(RuntimeError):
    """A model cannot be had or loaded; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk.

    `revision` pins what is in it: a hash of its content, a hub commit, or a seed. `vocab_size` is
    that of the embedding. `special_ids` are the ids that no random prompt may hold: control tokens,
    other added tokens, and padding of the embedding. `context_length` counts prompt and output.
    `synthetic` models have a shape and a seed but no weights on disk.
    """

    name: str
    path: Path
    revision: str
    vocab_size: int
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    context_length: int
    synthetic: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for `json.dumps`."""
        fields = asdict(self)
        fields |= {"path": str(self.path), "special_ids": list(self.special_ids)}
        return fields | {"eos_ids": list(self.eos_ids)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ModelFolder:
        """Read what `to_json` wrote; ValueError names a key that is missing or too many."""
        wanted = set(cls.__dataclass_fields__)
        for key in sorted(wanted ^ set(fields)):
            what = "lacks" if key in wanted else "has an unknown key"
            raise ValueError(f"the JSON of a ModelFolder {what} {key!r}")
        lists = {key: tuple(fields[key]) for key in ("special_ids", "eos_ids")}
        return cls(**{**fields, **lists, "path": Path(fields["path"])})


def write_manifest(folder: ModelFolder) -> None:
    """Declare the folder finished, with the size of every file in it."""
    files = {
        file.name: file.stat().st_size
        for file in sorted(folder.path.iterdir())
        if file.name != MANIFEST
    }
    text = {"schema": MANIFEST_SCHEMA, "model": folder.to_json(), "files": files}
    (folder.path / MANIFEST).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> ModelFolder | None:
    """Return the model in a finished folder; None when it is missing, damaged or of another time.

    Where the folder lies now counts, not where it lay when it was written.
    """
    try:
        text = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if text["schema"] != MANIFEST_SCHEMA:
            return None
        if any((path / name).stat().st_size != size for name, size in text["files"].items()):
            return None
        return replace(ModelFolder.from_json(text["model"]), path=path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe(path: Path, name: str, revision: str | None = None) -> ModelFolder:
    """Read the facts of a folder in Hugging Face's layout from its JSON files.

    Without a revision, it is a hash of the configuration, the tokenizer, and the names, sizes and
    samples of the weight files, from their first byte to their last: fast for any size.
    """
    config = _read_json(path / "config.json")
    text_config = config.get("text_config", config)
    try:
        vocab_size = int(text_config["vocab_size"])
        context_length = int(text_config["max_position_embeddings"])
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'} lacks the key {error}") from None
    eos_ids = _eos_ids(path, text_config)
    named = {text_config.get(f"{kind}_token_id") for kind in ("bos", "pad", "unk")}
    special = {id for id in named if isinstance(id, int)} | set(eos_ids)
    special |= _added_ids(path, vocab_size)
    return ModelFolder(
        name=name,
        path=path,
        revision=revision or content_hash(path),
        vocab_size=vocab_size,
        special_ids=tuple(sorted(id for id in special if 0 <= id < vocab_size)),
        eos_ids=eos_ids,
        context_length=context_length,
    )


def content_hash(path: Path) -> str:
    """Return a short hash of a model folder; see `describe`."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix not in HASHED or file.name == MANIFEST:
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()[:16]}"


def _eos_ids(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    eos = config.get("eos_token_id")
    if generation.exists():
        eos = _read_json(generation).get("eos_token_id", eos)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _added_ids(path: Path, vocab_size: int) -> set[int]:
    """Added tokens, and the rows of the embedding for which the tokenizer has no token."""
    file = path / "tokenizer.json"
    if not file.exists():
        return set()
    tokenizer = _read_json(file)
    added = {token["id"] for token in tokenizer.get("added_tokens", ())}
    vocab = tokenizer["model"]["vocab"]
    known = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    return added | (set(range(vocab_size)) - known - added)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: a model folder has one") from None
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value
