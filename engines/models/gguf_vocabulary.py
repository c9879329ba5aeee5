"""A tokenizer as llama.cpp wants it written into a GGUF file.

What an id stands for is exact. How a text becomes ids is llama.cpp's: of BPE it has the splits of
a few models by name, of words like tiny_recall's none, but finds them whole. And a stream of
llama.cpp holds back a piece that ends within a character, and then never sends its id: so such
pieces are marked as unused here, which leaves them out of the text and gives every id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.models.store import say
from headway.engines.models.tokenizer import FileTokenizer

# llama.cpp's types of tokens.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# The regular expression that a tokenizer.json splits by → llama.cpp's name for such a split.
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLITS = {
    rf"{SHORT}|{WORD}|\p{{N}}|{REST}": "qwen2",
    rf"{SHORT}|{WORD}|\p{{N}}{{1,3}}|{REST}": "llama-bpe",
}


def read(
    model: ModelFolder, tokenizer: Mapping[str, Any], config: Mapping[str, Any]
) -> Callable[[Any], None]:
    """Return what adds a model's vocabulary to a GGUFWriter; ModelError where none can."""
    kind, merges, split = _kind(tokenizer)
    tokens, types = _tokens(tokenizer, int(config["vocab_size"]), words=kind == "WordLevel")
    ours = FileTokenizer(model)
    template = model.path / "chat_template.jinja"
    chat = template.read_text("utf-8") if template.exists() else None

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        named = {name: config.get(f"{name}_token_id") for name in ("bos", "unk", "pad")}
        # It knows three ends of an answer, and more by their text.
        named |= zip(("eos", "eot", "eom"), model.eos_ids, strict=False)
        for name, id in named.items():
            if isinstance(id, int):
                getattr(writer, f"add_{name}_token_id")(id)
        writer.add_add_bos_token(ours.begins == (config.get("bos_token_id"),))
        if chat is not None:
            writer.add_chat_template(chat)

    return add


def _kind(tokenizer: Mapping[str, Any]) -> tuple[str, list[str], str]:
    """Return the type of a tokenizer, its merges, and llama.cpp's name for how it splits texts."""
    model = tokenizer["model"]
    kind = model.get("type")
    if kind == "WordLevel":
        # llama.cpp wants merges, of which this one finds nothing to do.
        return kind, ["< 0"], "default"
    if kind == "BPE" and not model.get("byte_fallback") and _byte_level(tokenizer):
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return kind, pairs, _split(tokenizer.get("pre_tokenizer") or {})
    raise ModelError(
        f"no GGUF file can be written of a tokenizer that is no byte-level BPE but {kind}: "
        "make one with llama.cpp's own converter, and name it by the argument gguf"
    )


def _byte_level(tokenizer: Mapping[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return any(step.get("type") == "ByteLevel" for step in steps)


def _split(pre: Mapping[str, Any]) -> str:
    steps = pre.get("pretokenizers", [pre])
    types = [step.get("type") for step in steps]
    patterns = [(step.get("pattern") or {}).get("Regex") for step in steps]
    if types == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if types == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    found = SPLITS.get(str(patterns[0]))
    if found is None:
        say(
            "llama.cpp has no split of texts like this tokenizer's: ids are right, texts may not be"
        )
    return found or "default"


def _tokens(
    tokenizer: Mapping[str, Any], vocab_size: int, words: bool
) -> tuple[list[str], list[int]]:
    """Return text and type of each id; rows of the embedding without a token are unused."""
    tokens = [f"[PAD{id}]" for id in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, id in tokenizer["model"]["vocab"].items():
        tokens[id] = text
        types[id] = USER_DEFINED if words else NORMAL if _whole(text) else UNUSED
    for added in tokenizer.get("added_tokens", ()):
        if added["id"] < vocab_size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level token stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): b for n, b in enumerate(others)}


LETTERS = _letters()


def _whole(text: str) -> bool:
    """Whether a byte-level token stands for whole characters."""
    try:
        bytes(LETTERS[letter] for letter in text).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return False
    return True
