"""A tokenizer for models that have no text: token 17 is written `<17>`.

It is an ordinary `tokenizer.json`, so that any engine can load it, and one that gives back the ids
it was given. A character that is not part of such a token is the unknown token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_plain_tokenizer(
    folder: Path, vocab_size: int, eos_id: int, unknown_id: int, special_ids: Iterable[int]
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; decoding skips `special_ids`."""
    vocabulary = {f"<{id}>": id for id in range(vocab_size)}
    tokenizer = word_level(vocabulary, f"<{unknown_id}>", r"<\d+>|[\s\S]")
    tokenizer["added_tokens"] = [_added(id) for id in sorted(special_ids)]
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": f"<{eos_id}>",
        "unk_token": f"<{unknown_id}>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def word_level(vocabulary: Mapping[str, int], unknown: str, pattern: str) -> dict[str, Any]:
    """Return a `tokenizer.json` of whole pieces: what `pattern` finds is one, or the unknown."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(vocabulary), "unk_token": unknown},
    }


def _added(id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": f"<{id}>", **flags, "special": True}
