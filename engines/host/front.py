"""The front: which path does what, which requests are accepted, and the state it all depends on."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.core import EngineInfo
from headway.engines.contract import Backend, Phase, Submission
from headway.engines.host.answer import Answer, Ended, StreamResponse, WholeResponse
from headway.engines.host.chunks import Shape
from headway.engines.host.http import HttpRequest, Reply
from headway.engines.host.inside import Schedule
from headway.engines.host.metrics import CONTENT_TYPE, Counts, render
from headway.engines.host.openai import (
    Ask,
    BadRequestError,
    parse_ask,
    parse_object,
    read_ask,
    require_whole,
)
from headway.engines.host.text import Transcript
from headway.engines.models.folder import ModelError

STEP_FIELDS = ("phase", "batch", "length")
REPLAY_FIELDS = ("requests", "concurrency", "slots_s")


class Tokenizer(Protocol):
    """Text to ids and back, as the model's own tokenizer does it."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """The ids that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What can be asked of a model, and how much is taken on at once."""

    vocab_size: int
    context_length: int
    max_unfinished: int


class Front:
    """Serves one backend. `live` loads it and returns when it has ended by itself."""

    def __init__(
        self,
        backend: Backend,
        load_tokenizer: Callable[[], Tokenizer],
        served_name: str,
        limits: Limits,
        extra: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        """`extra` adds GET paths that answer with what their function returns, as JSON."""
        self._backend = backend
        self._load_tokenizer = load_tokenizer
        self._served_name = served_name
        self._limits = limits
        self._tokenizer: Tokenizer | None = None
        self._info: EngineInfo | None = None
        self._down: str | None = "the engine is loading"  # why nothing can be served, or None
        self._unfinished: set[int] = set()
        self._numbers = itertools.count(1)
        self._counts = Counts()
        self._step_s = 0.0
        self._replaying = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_at = int(time.time())
        self._get: dict[str, Callable[[Reply], None]] = {
            "/health": self._health,
            "/v1/models": self._models,
            "/metrics": lambda reply: self._later(reply, self._metrics(reply)),
            "/headway/info": self._engine_info,
            "/headway/clock": _json_route(lambda: {"step_s": self._step_s}),
        }
        for path, content in (extra or {}).items():
            self._get[path] = _json_route(content)
        self._post: dict[str, Callable[[Reply, bytes], None]] = {
            "/v1/completions": lambda reply, body: self._complete(reply, body, chat=False),
            "/v1/chat/completions": lambda reply, body: self._complete(reply, body, chat=True),
            "/headway/step": lambda reply, body: self._later(reply, self._step(reply, body)),
            "/headway/replay": self._replay,
        }

    async def live(self) -> str:
        """Load, serve, and return why the engine ended; raises RuntimeError when it never began."""
        loop = asyncio.get_running_loop()
        tokenizer = loop.run_in_executor(None, self._load_tokenizer)
        self._info = await self._backend.start()
        self._tokenizer = await tokenizer
        self._down = None
        self._down = await self._backend.ended()
        return self._down

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        """Serve one request."""
        try:
            if request.method == "GET" and request.path in self._get:
                self._get[request.path](reply)
            elif request.method == "POST" and request.path in self._post:
                self._post[request.path](reply, request.body)
            else:
                self._refuse_route(request, reply)
        except BadRequestError as error:
            reply.refuse(error.status, error.message, error.param)

    def _refuse_route(self, request: HttpRequest, reply: Reply) -> None:
        allowed = "GET" if request.path in self._get else "POST"
        if request.path not in self._get and request.path not in self._post:
            reply.refuse(404, f"there is no {request.path[:100]} here")
        else:
            message = f"{request.path} takes {allowed}, not {request.method}"
            reply.refuse(405, message, Allow=allowed)

    def _later(self, reply: Reply, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)

    def _health(self, reply: Reply) -> None:
        if self._down is None:
            _send_json(reply, {"status": "ready"})
        else:
            reply.refuse(503, self._down)

    def _models(self, reply: Reply) -> None:
        model = {
            "id": self._served_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "headway",
            "max_model_len": self._limits.context_length,
        }
        _send_json(reply, {"object": "list", "data": [model]})

    def _engine_info(self, reply: Reply) -> None:
        if self._info is None:
            reply.refuse(503, self._down or "the engine is loading")
        else:
            _send_json(reply, dataclasses.asdict(self._info))

    async def _metrics(self, reply: Reply) -> None:
        stats = {} if self._down else await self._backend.stats()
        reply.send(200, render(self._counts, stats).encode(), CONTENT_TYPE)

    async def _step(self, reply: Reply, content: bytes) -> None:
        try:
            phase, batch, length = self._parse_step(content)
            seconds = await self._backend.control(phase, batch, length)
        except BadRequestError as error:
            reply.refuse(error.status, error.message, error.param)
        except ValueError as error:
            reply.refuse(400, str(error))
        except RuntimeError as error:
            reply.refuse(500, str(error))
        else:
            self._step_s += seconds
            _send_json(reply, {"seconds": seconds})

    def _parse_step(self, content: bytes) -> tuple[Phase, int, int]:
        body = parse_object(content, STEP_FIELDS)
        phase = body.get("phase")
        if phase not in ("prefill", "decode"):
            raise BadRequestError(400, f"phase must be prefill or decode, not {phase!r}", "phase")
        batch = require_whole(body, "batch", 1, 2**20)
        length = require_whole(body, "length", 1, self._limits.context_length)
        self._require_up()
        self._require_idle("a step is timed")
        return phase, batch, length

    def _require_idle(self, what: str) -> None:
        busy = f"{len(self._unfinished)} requests run" if self._unfinished else ""
        busy = "a replay runs" if self._replaying else busy
        if busy:
            raise BadRequestError(409, f"{what} on an idle engine; {busy}")

    def _replay(self, reply: Reply, content: bytes) -> None:
        """Serve requests in the engine itself; a client that goes away ends that."""
        work = asyncio.ensure_future(self._backend.replay(self._schedule(content)))
        self._replaying = True

        def gone() -> None:
            work.cancel()

        reply.on_disconnect = gone
        self._later(reply, self._replayed(reply, work))

    async def _replayed(self, reply: Reply, work: asyncio.Future[dict[str, Any]]) -> None:
        try:
            answer = await work
        except RuntimeError as error:
            reply.refuse(500, str(error))
        except asyncio.CancelledError:
            pass  # nobody waits for it any more
        else:
            _send_json(reply, answer)
        finally:
            self._replaying = False

    def _schedule(self, content: bytes) -> Schedule:
        body = parse_object(content, REPLAY_FIELDS)
        concurrency = require_whole(body, "concurrency", 1, self._limits.max_unfinished)
        slots_s = body.get("slots_s", [0.0] * concurrency)
        if not (
            isinstance(slots_s, list)
            and len(slots_s) == concurrency
            and all(type(at_s) in (int, float) and 0 <= at_s < math.inf for at_s in slots_s)
        ):
            message = f"slots_s must be {concurrency} numbers of seconds, one for each slot"
            raise BadRequestError(400, message, "slots_s")
        tokenizer = self._require_up()
        self._require_idle("requests are replayed")
        given = body.get("requests")
        if not isinstance(given, list) or not given:
            raise BadRequestError(400, "requests must be a list of at least one", "requests")
        submissions = []
        for number, one in enumerate(given):
            try:
                ask = read_ask(one, chat=isinstance(one, dict) and "messages" in one)
                if ask.stop:
                    said = "stop texts are looked for in the front: it cannot be replayed inside"
                    raise BadRequestError(400, said, "stop")
                submissions.append(self._submission(ask, tokenizer))
            except BadRequestError as error:
                raise BadRequestError(
                    error.status, f"requests[{number}]: {error.message}", "requests"
                ) from None
        return Schedule(tuple(submissions), tuple(map(float, slots_s)))

    def _require_up(self) -> Tokenizer:
        if self._down is not None or self._tokenizer is None:
            raise BadRequestError(503, self._down or "the tokenizer is loading")
        return self._tokenizer

    def _complete(self, reply: Reply, content: bytes, chat: bool) -> None:
        tokenizer = self._require_up()
        if self._replaying:
            raise BadRequestError(409, "a replay runs, and nothing beside it")
        if len(self._unfinished) >= self._limits.max_unfinished:
            self._counts.refused += 1
            message = f"{len(self._unfinished)} requests are unfinished, the most that are taken on"
            reply.refuse(429, message, Retry_After="1")
            return
        ask = parse_ask(content, chat)
        submission = self._submission(ask, tokenizer)
        shape = Shape(submission.id, int(time.time()), ask.model, chat, ask.return_token_ids)
        prompt = submission.prompt_token_ids
        answer = Answer(
            submission,
            Transcript(tokenizer.decode, ask.stop, tokenizer.eos_ids),
            StreamResponse(reply, shape, prompt, ask.include_usage)
            if ask.stream
            else WholeResponse(reply, shape, prompt),
            self._ended,
        )
        reply.on_disconnect = answer.disconnected
        self._unfinished.add(submission.id)
        self._backend.submit(submission, answer.deliver)

    def _submission(self, ask: Ask, tokenizer: Tokenizer) -> Submission:
        if ask.model != self._served_name:
            message = f"model {ask.model[:100]!r} is not served here; {self._served_name!r} is"
            raise BadRequestError(404, message, "model")
        ids = self._prompt_ids(ask, tokenizer)
        room = self._limits.context_length - len(ids)
        max_tokens = room if ask.max_tokens is None else ask.max_tokens
        if room < max(1, max_tokens):
            message = (
                f"{len(ids)} prompt tokens and max_tokens {max(1, max_tokens)} are more than the"
                f" context length {self._limits.context_length}"
            )
            raise BadRequestError(400, message, "max_tokens")
        return Submission(
            id=next(self._numbers),
            prompt_token_ids=ids,
            max_tokens=max_tokens,
            ignore_eos=ask.ignore_eos,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            salt=ask.salt,
        )

    def _prompt_ids(self, ask: Ask, tokenizer: Tokenizer) -> tuple[int, ...]:
        where = "prompt" if ask.messages is None else "messages"
        if ask.messages is not None:
            try:
                ids = tuple(tokenizer.chat(ask.messages))
            except ModelError as error:
                raise BadRequestError(400, str(error), where) from None
        elif ask.prompt_text is not None:
            try:
                ids = tuple(tokenizer.encode(ask.prompt_text))
            except (TypeError, UnicodeError):  # half of a surrogate pair is no text
                raise BadRequestError(400, f"{where} is not valid Unicode text", where) from None
        else:
            ids = ask.prompt_token_ids or ()
        if not ids:
            raise BadRequestError(400, f"{where} holds no token; at least one is needed", where)
        if not 0 <= min(ids) <= max(ids) < self._limits.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            message = f"{where} holds token id {wrong}; ids are 0 to {self._limits.vocab_size - 1}"
            raise BadRequestError(400, message, where)
        return ids

    def _ended(self, ended: Ended) -> None:
        submission = ended.submission
        self._unfinished.discard(submission.id)
        prompt_tokens = len(submission.prompt_token_ids)
        self._counts.add(ended.finish_reason, prompt_tokens, ended.num_tokens)
        if ended.at_work:
            self._backend.abort(submission.id)


def _json_route(content: Callable[[], object]) -> Callable[[Reply], None]:
    return lambda reply: _send_json(reply, content())


def _send_json(reply: Reply, value: object) -> None:
    reply.send(200, json.dumps(value, default=str).encode())
