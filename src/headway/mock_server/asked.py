"""What a request asks for, from an OpenAI body. Pure.

Fields that change nothing here (sampling, stop words, `min_tokens`) are accepted unseen, so that
every client is served; the few that count are checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_TOKENS = 64
MOST_TOKENS = 1_000_000


class RefusedError(Exception):
    """A request that is answered with an error: status and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Asked:
    """One checked request. A prompt has as many tokens as ids, or else as words."""

    chat: bool
    stream: bool
    prompt_tokens: int
    max_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    ignore_eos: bool = False


def parse(chat: bool, content: bytes) -> Asked:
    """Read a body; raises RefusedError."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RefusedError(400, f"stream_options is {options!r}; it must be an object")
    if body.get("n") not in (None, 1):
        raise RefusedError(400, f"n is {body['n']!r}; one answer a request is all there is here")
    return Asked(
        chat=chat,
        stream=_flag(body, "stream"),
        prompt_tokens=_chat_tokens(body) if chat else _prompt_tokens(body.get("prompt")),
        max_tokens=_max_tokens(body),
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats"),
        token_ids=_flag(body, "return_token_ids"),
        ignore_eos=_flag(body, "ignore_eos"),
    )


def _flag(table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key)
    if value is not None and not isinstance(value, bool):
        raise RefusedError(400, f"{key} is {value!r}; it must be true or false")
    return bool(value)


def _max_tokens(body: Mapping[str, Any]) -> int:
    """`max_completion_tokens` is the newer name, so it wins; null is the default."""
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= MOST_TOKENS:
            raise RefusedError(400, f"{key} is {value!r}; it must be from 1 to {MOST_TOKENS}")
        return value
    return DEFAULT_TOKENS


def _prompt_tokens(prompt: object) -> int:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one is how some clients write one prompt
    if isinstance(prompt, str):
        return len(prompt.split())
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return len(prompt)
    raise RefusedError(400, "prompt must be a string or a list of token ids, one prompt a request")


def _chat_tokens(body: Mapping[str, Any]) -> int:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RefusedError(400, "messages must be a list of objects")
    words = 0
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            words += len(text.split()) if isinstance(text, str) else 0
    return words
