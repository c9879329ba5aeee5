"""Text to ids and back, without torch: the HTTP front runs this, and starts in a second."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from headway.engines.models.folder import ModelError, ModelFolder


class Tokenizer(Protocol):
    """What the front asks of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""

    @property
    def begins(self) -> tuple[int, ...]:
        """The ids that it puts before a text by itself, where it is told to add special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special tokens are added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the prompt that asks for the next assistant message.

        Raises ModelError when the model has no chat template or its template refuses the messages.
        """


class FileTokenizer:
    """The tokenizer of a model folder: `tokenizer.json` and the folder's chat template.

    The template is text from whoever made the model, so it runs in jinja's sandbox.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.eos_ids = folder.eos_ids
        self._path = folder.path
        self._tokenizer = _read_tokenizer(folder.path / "tokenizer.json")
        self._config = _read_config(folder.path)
        self.begins = _begins(self._tokenizer)
        self._template = _compile(folder.path, self._config)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; control tokens written out in it become those tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the prompt that asks for the next assistant message."""
        if self._template is None:
            raise ModelError(f"the model in {self._path} has no chat template")
        try:
            text = self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                **_special_tokens(self._config),
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ModelError(
                f"the chat template of {self._path} refuses the messages: {error}"
            ) from error
        return self.encode(text)


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """Return the tokenizer of a model; ModelError when its folder has none."""
    return FileTokenizer(folder)


def _read_tokenizer(file: Path) -> FastTokenizer:
    if not file.exists():
        raise ModelError(f"{file} is missing: Headway reads fast tokenizers only")
    tokenizer = FastTokenizer.from_file(str(file))
    # A file may carry the lengths of its training; a prompt is neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _begins(tokenizer: FastTokenizer) -> tuple[int, ...]:
    """Return what stands before a text and not behind it; what would is for no prompt."""
    plain, full = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
    front = len(full) - len(plain)
    return tuple(full[:front]) if full[front:] == plain else ()


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which are a string or an object around one."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and value}
    return {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in tokens.items()
        if isinstance(value, str | dict)
    }


def _compile(path: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):
        source = next((one["template"] for one in source if one["name"] == "default"), None)
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template of {path} is not valid: {error}") from error


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    # Jinja's own filter escapes for HTML, which the model never saw.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
