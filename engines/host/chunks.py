"""OpenAI's answers: pieces of text and ids to the bytes of a stream or of one body. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from headway.engines.host.text import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Stamps:
    """The engine's own times for a piece, in monotonic seconds: request taken in, tokens out."""

    arrived_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the answer states them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def as_json(self) -> Mapping[str, object]:
        """Return OpenAI's `usage` object; without cached tokens for an engine that has no cache."""
        cached = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            **({} if self.cached_tokens is None else cached),
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """What all chunks of one answer share. `id` ends in the submission's number."""

    number: int
    created: int
    model: str
    chat: bool
    with_token_ids: bool

    @property
    def id(self) -> str:
        """The answer's id: `cmpl-N` or `chatcmpl-N`."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"


class ChunkWriter:
    """Writes the chunks of one stream; what is the same in all of them is encoded once."""

    def __init__(self, shape: Shape, prompt_token_ids: tuple[int, ...]) -> None:
        self._shape = shape
        kind = "chat.completion.chunk" if shape.chat else "text_completion"
        self._head = _compact(
            {"id": shape.id, "object": kind, "created": shape.created, "model": shape.model}
        )[:-1]
        # The first chunk alone says which ids the prompt had: as vLLM does, in the choice, and for
        # a chat beside the choices.
        self._prompt_ids = prompt_token_ids if shape.with_token_ids else None

    def role(self) -> bytes:
        """Return the chunk that opens a chat message; it carries no token."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        prompt = self._prompt()
        return f'data: {self._head},"choices":[{_compact(choice)}]{prompt}}}\n\n'.encode()

    def piece(self, piece: Piece, stamps: Stamps) -> bytes:
        """Return the chunk for one piece."""
        text = json.dumps(piece.text)
        said = f'"delta":{{"content":{text}}}' if self._shape.chat else f'"text":{text}'
        reason = "null" if piece.finish_reason is None else json.dumps(piece.finish_reason)
        ids = ""
        if self._shape.with_token_ids:
            ids = f',"token_ids":[{",".join(map(str, piece.token_ids))}]{self._prompt()}'
        return (
            f'data: {self._head},"choices":[{{"index":0,{said},"logprobs":null,'
            f'"finish_reason":{reason}{ids}}}],'
            f'"headway":{{"arrived_s":{stamps.arrived_s!r},"at_s":{stamps.at_s!r}}}}}\n\n'
        ).encode()

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that only counts."""
        return f'data: {self._head},"choices":[],"usage":{_compact(usage.as_json())}}}\n\n'.encode()

    def _prompt(self) -> str:
        if self._prompt_ids is None:
            return ""
        ids, self._prompt_ids = self._prompt_ids, None
        return f',"prompt_token_ids":[{",".join(map(str, ids))}]'


def whole_body(
    shape: Shape, piece: Piece, usage: Usage, stamps: Stamps, prompt_token_ids: tuple[int, ...]
) -> bytes:
    """Return the body of an answer that is not streamed; `stamps.at_s` is its last token's."""
    choice: dict[str, object] = {"index": 0, "logprobs": None}
    if shape.chat:
        choice["message"] = {"role": "assistant", "content": piece.text}
    else:
        choice["text"] = piece.text
    choice["finish_reason"] = piece.finish_reason
    if shape.with_token_ids:
        choice["token_ids"] = piece.token_ids
    body: dict[str, object] = {
        "id": shape.id,
        "object": "chat.completion" if shape.chat else "text_completion",
        "created": shape.created,
        "model": shape.model,
        "choices": [choice],
        "usage": usage.as_json(),
        "headway": {"arrived_s": stamps.arrived_s, "at_s": stamps.at_s},
    }
    if shape.with_token_ids:
        (body if shape.chat else choice)["prompt_token_ids"] = prompt_token_ids
    return _compact(body).encode()


def error_event(content: bytes) -> bytes:
    """Return an error body as the last event of a stream that began well."""
    return b"data: " + content + b"\n\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
