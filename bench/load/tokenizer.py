"""The tokenizer that the peers make their prompts with: a printable ASCII character is a token.

Peers want one, and a hub is not always reachable. Any text can be cut to any number of tokens with
it, and any ids have a text; the mock server looks at neither.
"""

from __future__ import annotations

import json
from pathlib import Path

from headway.engines.models.plain_tokenizer import word_level

CHARACTERS = "".join(map(chr, range(32, 127)))


def write(folder: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(folder)` reads."""
    folder.mkdir()
    vocabulary = {character: id for id, character in enumerate(CHARACTERS)}
    tokenizer = word_level(vocabulary, "?", r"[\s\S]")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
