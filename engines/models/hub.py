"""Models that already exist: a folder on this machine, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from headway.engines.models.folder import ModelError, ModelFolder, describe
from headway.engines.models.store import say

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_local(name: str) -> bool:
    """Whether the name is written as a path, or is one."""
    return name.startswith(("/", "./", "../", "~")) or Path(name).is_dir()


def looks_remote(name: str) -> bool:
    """Whether the name could be a hub id."""
    return _HUB_ID.fullmatch(name) is not None


def prepare_local(name: str, revision: str | None = None) -> ModelFolder:
    """Describe a folder in Hugging Face's layout; nothing is copied.

    Its revision is a hash of its content; a `revision` asked for must be that one.
    """
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder")
    folder = describe(path, name)
    if revision not in (None, folder.revision):
        raise ModelError(f"{path} has the revision {folder.revision}, not {revision!r}")
    return folder


def prepare_remote(name: str, home: Path, revision: str | None = None) -> ModelFolder:
    """Download a repository's configuration, tokenizer and safetensors; code is never fetched."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise ModelError(
            f"downloading {name} needs the package huggingface_hub, which this Python lacks"
        ) from error
    cache = home / "models" / "hub"
    say(f"looking for {name} at {revision or 'its newest revision'} on the hub")
    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=list(PATTERNS)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot fetch {name} from the Hugging Face hub: {cause}; to use another model, name "
            "smollm2_135m, which comes from the package index, or a model folder"
        ) from error
    # A snapshot's folder is named after its commit.
    return describe(Path(found), name, Path(found).name)
