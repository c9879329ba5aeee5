"""A request as the bytes that are sent, with the fields that the endpoint understands."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from headway.core import CHAT, COMPLETIONS, Capabilities, Request
from headway.transport import Target


@dataclass(frozen=True, slots=True)
class Recipient:
    """Whom requests are written for: where it is, what it calls its model, what it understands.

    Requests with the same `salt` may find each other's prompts in the prefix cache, and no others.
    """

    target: Target
    model: str
    can: Capabilities = field(default_factory=Capabilities)
    api_key: str | None = field(default=None, repr=False)
    salt: str | None = None


def payload(request: Request, recipient: Recipient) -> bytes:
    """Serialize a request."""
    key = recipient.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not recipient.can.keep_alive:
        headers["Connection"] = "close"
    ours = request.endpoint == COMPLETIONS and request.body is None
    path = recipient.can.completions if ours else request.endpoint
    return recipient.target.post(path, body(request, recipient), headers)


def body(request: Request, recipient: Recipient) -> dict[str, Any]:
    """Return what is sent of a request, as JSON values."""
    made = _made(request, recipient) if request.body is None else _given(request, recipient)
    if recipient.can.usage_in_stream:
        made.setdefault("stream_options", {"include_usage": True})
    if recipient.can.salt is not None and recipient.salt is not None:
        made.setdefault(recipient.can.salt, recipient.salt)
    return made


def _made(request: Request, recipient: Recipient) -> dict[str, Any]:
    can = recipient.can
    body: dict[str, Any] = {
        "model": recipient.model,
        **_prompt(request),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
        **can.fields,
        **({} if request.endpoint == CHAT else can.completions_fields),
        **(can.greedy_fields if request.temperature == 0 else {}),
    }
    if request.top_p == 1 and not can.top_p_of_1:
        del body["top_p"]
    if request.seed is not None:
        body["seed"] = request.seed
    if request.ignore_eos and can.ignore_eos != "none":
        body |= can.past_end
    return body


def _prompt(request: Request) -> dict[str, Any]:
    if not request.texts:
        return {"prompt": list(request.prompt_token_ids)}
    if request.endpoint != CHAT:
        (text,) = request.texts
        return {"prompt": text}
    roles = itertools.cycle(("user", "assistant"))
    said = zip(roles, request.texts, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def _given(request: Request, recipient: Recipient) -> dict[str, Any]:
    """Return a request of the user's own: it is streamed, and the rest is as it was written.

    A model that it names stays: it may be an adapter of the one that is served.
    """
    assert request.body is not None
    body: dict[str, Any] = json.loads(request.body)
    body.setdefault("model", recipient.model)
    if request.max_tokens is not None:
        short = "max_completion_tokens" not in body
        body["max_tokens" if short else "max_completion_tokens"] = request.max_tokens
    return body | {"stream": True}
