"""What the bytes of an answer look like, by the server that is played. Pure.

Only the shape is played: which chunks there are, their keys, where the usage stands, how it ends.
Text is plain words, a word a token, the same in every answer; a token's id is its word's place.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from headway.mock_server.asked import Asked

_VOCABULARY = (
    "water stone river light cloud field house garden window table letter number market bridge "
    "street corner winter summer morning evening silver copper paper cotton needle thread button "
    "pocket bottle basket candle mirror ladder hammer engine wheel harbor island valley forest "
    "meadow orchard pebble feather saddle barrel anchor lantern violin trumpet melody rhythm "
    "pencil canvas marble velvet ginger pepper butter honey walnut cherry almond barley"
)
WORDS = tuple(f" {word}" for word in _VOCABULARY.split())
IDENT_DIGITS = 12
# Stands for the id in chunks that are encoded once; as long as every id, so that sizes hold.
_IDENT = b"#" * IDENT_DIGITS
LAST_CHUNK = b"0\r\n\r\n"
COMMENT = b"f\r\n: still alive\n\n\r\n"
_USAGE = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
_STAMPS = b',"headway":{"arrived_s":%.9f,"at_s":%.9f}'
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """The chunks of one endpoint of one server.

    `role`: where "assistant" stands: alone in a chunk that leaves with the response's head
    ("early") or with the first token ("first", as all that wait for it do), or in "every" chunk.
    `finish`: the finish reason is in the "last" token's chunk, or in its "own". `usage`: in a chunk
    of its own without choices when "asked", or "always" in the chunk of the finish reason.
    """

    role: Literal["early", "first", "every"] = "first"
    role_content: Mapping[str, str | None] = field(default_factory=lambda: {"content": ""})
    finish: Literal["last", "own"] = "last"
    unfinished: str | None = None
    usage: Literal["asked", "always"] = "asked"
    continuous_usage: bool = False
    token_ids: bool = False
    stamps: bool = False
    done: bool = True
    data: bytes = b"data: "
    bare_error: bool = False
    top: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One server: its two endpoints."""

    completions: Shape
    chat: Shape


_LOGPROBS = {"logprobs": None}
_PRINT = {"system_fingerprint": "mock"}
_TRANSFORMERS = Shape(
    role="early", role_content={}, finish="own", usage="always", done=False, bare_error=True
)
_HEADWAY = Shape(token_ids=True, stamps=True, choice=_LOGPROBS)

DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        Shape(continuous_usage=True, token_ids=True, choice={**_LOGPROBS, "stop_reason": None}),
        Shape(continuous_usage=True, token_ids=True, choice=_LOGPROBS),
    ),
    "sglang": Dialect(
        Shape(
            continuous_usage=True, top={"usage": None}, choice={**_LOGPROBS, "matched_stop": None}
        ),
        Shape(
            continuous_usage=True,
            finish="own",
            top={"usage": None},
            choice={**_LOGPROBS, "matched_stop": None},
        ),
    ),
    # The web framework that it grew up with writes no space behind the colon.
    "tgi": Dialect(
        Shape(data=b"data:", unfinished="", top=_PRINT, choice=_LOGPROBS),
        Shape(data=b"data:", role="every", top=_PRINT, choice=_LOGPROBS),
    ),
    "tensorrt_llm": Dialect(
        Shape(continuous_usage=True, choice={**_LOGPROBS, "stop_reason": None}),
        Shape(continuous_usage=True, choice={**_LOGPROBS, "stop_reason": None}),
    ),
    "llama_cpp": Dialect(
        Shape(finish="own", usage="always", top=_PRINT, choice=_LOGPROBS),
        Shape(finish="own", role_content={"content": None}, top=_PRINT),
    ),
    "transformers": Dialect(_TRANSFORMERS, _TRANSFORMERS),
    "headway": Dialect(_HEADWAY, _HEADWAY),
}


@dataclass(frozen=True, slots=True)
class Writer:
    """What all answers of a server share; `created` is a Unix time in whole seconds."""

    dialect: str
    model: str
    tokens_per_chunk: int
    created: int

    def shape(self, chat: bool) -> Shape:
        """Return the shape of one endpoint."""
        dialect = DIALECTS[self.dialect]
        return dialect.chat if chat else dialect.completions

    def event(
        self, chat: bool, ident: bytes, choice: Mapping[str, Any] | None, **more: Any
    ) -> bytes:
        """Return one event; `more` are keys beside its choices."""
        shape = self.shape(chat)
        common = self.common("chat.completion.chunk" if chat else "text_completion", chat, ident)
        choices = [] if choice is None else [choice]
        body = {**common, **shape.top, "choices": choices, **more}
        return shape.data + compact(body) + b"\n\n"

    def common(self, kind: str, chat: bool, ident: bytes) -> dict[str, Any]:
        """Return the keys that open every body and event."""
        name = ("chatcmpl-" if chat else "cmpl-") + ident.decode()
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def choice(
        self, chat: bool, ids: bool, start: int, n: int, reason: str | None
    ) -> dict[str, Any]:
        """Return the choice that carries tokens start … start + n - 1."""
        shape, text = self.shape(chat), text_of(start, n)
        role = {"role": "assistant"} if shape.role == "every" else {}
        said: dict[str, Any] = {"delta": {**role, "content": text}} if chat else {"text": text}
        reason = shape.unfinished if reason is None else reason
        found = {"token_ids": ids_of(start, n)} if ids else {}
        return {"index": 0, **said, **shape.choice, "finish_reason": reason, **found}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as bytes for each of its writes. `number` is its request's."""

    writer: Writer
    asked: Asked
    number: int
    parsed_s: float

    def num_writes(self) -> int:
        """Return how many writes carry tokens."""
        size = self.writer.tokens_per_chunk
        return math.ceil(self.asked.max_tokens / size) if self.asked.stream else 1

    def tokens(self, write: int) -> int:
        """Return how many tokens a write carries."""
        if not self.asked.stream:
            return self.asked.max_tokens
        size = self.writer.tokens_per_chunk
        return min(size, self.asked.max_tokens - write * size)

    def early(self) -> bytes:
        """Return what leaves together with the head of a stream."""
        return self._role() if self._shape.role == "early" else b""

    def stream(self, done: bool = True) -> Iterator[bytes]:
        """Yield the bytes of each write of a stream, chunk framing and all.

        The role leaves with the first, all that ends the stream with the last; without `done` the
        stream ends as it should, but for its [DONE].
        """
        first = self._role() if self._shape.role == "first" else b""
        chunks = itertools.islice(self._chunks(), self.num_writes() - 1)
        for chunk in chunks:
            yield first + chunk
            first = b""
            yield from chunks
        yield first + self._last(done)

    def error(self, message: str) -> bytes:
        """Return an error inside a stream that began well, and the stream's end."""
        shape = self._shape
        body = {"error": message} if shape.bare_error else error_of(500, message)
        done = [_DONE] if shape.done else []
        return _chunks_of(shape.data + compact(body) + b"\n\n", *done) + LAST_CHUNK

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        asked, shape = self.asked, self._shape
        choice = self.writer.choice(asked.chat, self._ids, 0, asked.max_tokens, "length")
        if "delta" in choice:
            choice["message"] = {"role": "assistant", **choice.pop("delta")}
        kind = "chat.completion" if asked.chat else "text_completion"
        body = {
            **self.writer.common(kind, asked.chat, self._ident),
            **shape.top,
            "choices": [choice],
            "usage": self._usage,
        }
        return compact({**body, **self._stamps()})

    @property
    def _shape(self) -> Shape:
        return self.writer.shape(self.asked.chat)

    @property
    def _ident(self) -> bytes:
        return b"%0*d" % (IDENT_DIGITS, self.number)

    @property
    def _ids(self) -> bool:
        return self.asked.token_ids and self._shape.token_ids

    @property
    def _counting(self) -> bool:
        """Whether every chunk says how many tokens there have been."""
        asked = self.asked
        return asked.continuous_usage and asked.include_usage and self._shape.continuous_usage

    @property
    def _usage(self) -> dict[str, int]:
        return _usage(self.asked.prompt_tokens, self.asked.max_tokens)

    def _stamps(self) -> dict[str, Any]:
        if not self._shape.stamps:
            return {}
        return {"headway": {"arrived_s": self.parsed_s, "at_s": time.monotonic()}}

    def _event(self, choice: Mapping[str, Any] | None, **more: Any) -> bytes:
        return self.writer.event(self.asked.chat, self._ident, choice, **more)

    def _role(self) -> bytes:
        """Return the chunk with the role; completions have none."""
        if not self.asked.chat:
            return b""
        delta = {"role": "assistant", **self._shape.role_content}
        choice = {"index": 0, "delta": delta, **self._shape.choice, "finish_reason": None}
        prompt = self.asked.prompt_tokens
        counts = {"usage": _usage(prompt, 0)} if self._counting else {}
        return _chunks_of(self._event(choice, **counts))

    def _chunks(self) -> Iterator[bytes]:
        """Yield chunks of tokens without an end; what is the same in all is encoded once."""
        ident, stamps, counting = self._ident, self._shape.stamps, self._counting
        if not (stamps or counting):
            for before, after in itertools.cycle(_framed(self.writer, self.asked.chat, self._ids)):
                yield before + ident + after
        bare = _bare(self.writer, self.asked.chat, self._ids, counting)
        prompt, sent = self.asked.prompt_tokens, 0
        for before, after in itertools.cycle(bare):
            sent += self.writer.tokens_per_chunk
            counts = _USAGE % (prompt, sent, prompt + sent) if counting else b""
            stamped = _STAMPS % (self.parsed_s, time.monotonic()) if stamps else b""
            data = b"%b%b%b%b%b}\n\n" % (before, ident, after, counts, stamped)
            yield b"%x\r\n%b\r\n" % (len(data), data)

    def _last(self, done: bool) -> bytes:
        asked, shape, last = self.asked, self._shape, self.num_writes() - 1
        own = shape.finish == "own"
        start, n = last * self.writer.tokens_per_chunk, self.tokens(last)
        choice = self.writer.choice(asked.chat, self._ids, start, n, None if own else "length")
        counts = {"usage": self._usage} if self._counting else {}
        events = [self._event(choice, **counts, **self._stamps())]
        if own:
            said: dict[str, Any] = {"delta": {}} if asked.chat else {"text": ""}
            choice = {"index": 0, **said, **shape.choice, "finish_reason": "length"}
            counts = {"usage": self._usage} if shape.usage == "always" else {}
            events.append(self._event(choice, **counts))
        if shape.usage == "asked" and asked.include_usage:
            events.append(self._event(None, usage=self._usage))
        if shape.done and done:
            events.append(_DONE)
        return _chunks_of(*events) + LAST_CHUNK


@cache
def _bare(writer: Writer, chat: bool, ids: bool, counting: bool) -> tuple[tuple[bytes, bytes], ...]:
    """Return the events of whole chunks, in turn, as what is before and behind the id.

    The brace that closes them, and the empty line, are left to be written.
    """
    size, events = writer.tokens_per_chunk, []
    for k in range(len(WORDS) // math.gcd(size, len(WORDS))):
        choice = writer.choice(chat, ids, k * size, size, None)
        event = writer.event(chat, _IDENT, choice)
        if counting:
            event = event.replace(b'"usage":null,', b"")
        before, _, after = event.partition(_IDENT)
        events.append((before, after.removesuffix(b"}\n\n")))
    return tuple(events)


@cache
def _framed(writer: Writer, chat: bool, ids: bool) -> tuple[tuple[bytes, bytes], ...]:
    """Return the same as whole HTTP chunks."""
    return tuple(
        (
            b"%x\r\n%b" % (len(before) + IDENT_DIGITS + len(after) + 3, before),
            after + b"}\n\n\r\n",
        )
        for before, after in _bare(writer, chat, ids, False)
    )


def _usage(prompt: int, output: int) -> dict[str, int]:
    total = prompt + output
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}


def _chunks_of(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def text_of(start: int, n: int) -> str:
    """Return tokens start … start + n - 1 as text."""
    return "".join(WORDS[k % len(WORDS)] for k in range(start, start + n))


def ids_of(start: int, n: int) -> list[int]:
    """Return their ids."""
    return [k % len(WORDS) for k in range(start, start + n)]


def error_of(status: int, message: str) -> dict[str, Any]:
    """Return an error as OpenAI's API has it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def compact(value: object) -> bytes:
    """Return JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
