"""One event's JSON, in the dialect that its own keys show, into the draft.

OpenAI's completions and chat (vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp, transformers, ours) have
`choices`; SGLang's /generate has `meta_info`, TGI's /generate_stream `token`, llama.cpp's
/completion `content` and `stop`; events of OpenAI's Responses API say their `type`.
"""

from __future__ import annotations

import json
from typing import Any

from headway.core import EventKind
from headway.sse.draft import MOST, Draft, Snapshot, add, fail, set_count, set_finish

RESPONSES: dict[str, EventKind] = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "tool",
}


def take(draft: Draft, at_s: float, data: bytes) -> None:
    """Take in one event; what it says wrong becomes the draft's error."""
    if not data.strip():
        return
    try:
        body = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        shown = data[:80].decode("utf-8", "replace")
        # transformers 5.19 puts the message of an exception between quotes as it is.
        if data.lstrip().startswith(b'{"error"'):
            fail(draft, "server_error", data.decode("utf-8", "replace"))
        else:
            fail(draft, "malformed_event", f"the stream holds {shown!r}, not JSON")
        return
    if not isinstance(body, dict):
        fail(draft, "malformed_event", f"an event holds {type(body).__name__}")
    elif body.get("error") is not None:
        fail(draft, "server_error", _error_text(body["error"], data))
    elif body.get("object") == "error" or body.get("type") == "error":
        # Older vLLM and the Responses API send an error's fields without a wrapper.
        fail(draft, "server_error", _error_text(body, data))
    else:
        _take_body(draft, at_s, body)


def _take_body(draft: Draft, at_s: float, body: dict[str, Any]) -> None:
    _take_usage(draft, body.get("usage"))
    if "choices" in body:
        _take_openai(draft, at_s, body)
    elif isinstance(body.get("meta_info"), dict):
        _take_sglang(draft, at_s, body, body["meta_info"])
    elif isinstance(body.get("token"), dict):
        _take_tgi(draft, at_s, body, body["token"])
    elif "content" in body and "stop" in body:
        _take_llama(draft, at_s, body)
    elif isinstance(body.get("type"), str):
        _take_responses(draft, at_s, body)


def _take_openai(draft: Draft, at_s: float, body: dict[str, Any]) -> None:
    choices = body["choices"]
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not _alone(draft, choice.get("index"), len(choices)):
        return
    set_finish(draft, choice.get("finish_reason"))
    delta = choice.get("delta")
    text, kind = _delta(delta) if isinstance(delta, dict) else (_text(choice.get("text")), None)
    timings = _table(body.get("timings"))
    _take_cached(draft, timings.get("cache_n"))
    stamps = _table(body.get("headway"))
    if draft.engine_arrived_s is None:
        draft.engine_arrived_s = _number(stamps.get("arrived_s"))
    total = _count(_table(body.get("usage")).get("completion_tokens"))
    add(
        draft,
        at_s,
        text,
        _ids(choice.get("token_ids")),
        kind=kind or "content",
        total=_count(timings.get("predicted_n")) if total is None else total,
        engine_at_s=_number(stamps.get("at_s")),
    )


def _delta(delta: dict[str, Any]) -> tuple[str, EventKind]:
    """Return reasoning, tool arguments and content of a chat choice in one, and what it counts as:
    content before a tool's arguments before reasoning."""
    content = _text(delta.get("content"))
    # Some servers send the same reasoning under both names; it was generated once.
    reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
    arguments = ""
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = _table(call.get("function")) if isinstance(call, dict) else {}
        arguments += _text(function.get("arguments"))
    kind: EventKind = "content" if content else "tool" if arguments else "reasoning"
    return reasoning + arguments + content, kind


def _take_sglang(draft: Draft, at_s: float, body: dict[str, Any], meta: dict[str, Any]) -> None:
    if not _alone(draft, body.get("index")):
        return
    set_count(draft, "prompt_tokens", meta.get("prompt_tokens"))
    set_count(draft, "completion_tokens", meta.get("completion_tokens"))
    _take_cached(draft, meta.get("cached_tokens"))
    total = _count(meta.get("completion_tokens"))
    ids = _ids(body.get("output_ids"))
    draft.snapshots.append(Snapshot(at_s, _text(body.get("text")), ids, total))
    reason = _table(meta.get("finish_reason"))
    set_finish(draft, reason.get("type"))
    if reason.get("type") == "abort" and isinstance(reason.get("message"), str):
        fail(draft, "server_error", reason["message"])


def _take_tgi(draft: Draft, at_s: float, body: dict[str, Any], token: dict[str, Any]) -> None:
    # The text of a special token is its name, which is no part of what was generated.
    text = "" if token.get("special") is True else _text(token.get("text"))
    add(draft, at_s, text, _ids([token.get("id")]))
    details = _table(body.get("details"))
    set_count(draft, "prompt_tokens", details.get("input_length"))
    set_count(draft, "completion_tokens", details.get("generated_tokens"))
    set_finish(draft, details.get("finish_reason"))
    draft.done = draft.done or isinstance(body.get("generated_text"), str)


def _take_llama(draft: Draft, at_s: float, body: dict[str, Any]) -> None:
    if not _alone(draft, body.get("index")):
        return
    set_count(draft, "prompt_tokens", body.get("tokens_evaluated"))
    set_count(draft, "completion_tokens", body.get("tokens_predicted"))
    _take_cached(draft, _table(body.get("timings")).get("cache_n"))
    # An empty list is also what a server sends that was not asked for ids.
    ids = _ids(body.get("tokens")) or None
    add(draft, at_s, _text(body["content"]), ids, total=_count(body.get("tokens_predicted")))
    set_finish(draft, body.get("stop_type"))
    draft.done = draft.done or body["stop"] is True


def _take_responses(draft: Draft, at_s: float, body: dict[str, Any]) -> None:
    said, item = body["type"], body.get("item_id")
    if said in RESPONSES:
        draft.deltas_of.add(str(item))
        add(draft, at_s, _text(body.get("delta")), None, kind=RESPONSES[said])
    elif said == "response.function_call_arguments.done" and str(item) not in draft.deltas_of:
        # transformers sends a call's arguments in one piece, and no delta before it.
        add(draft, at_s, _text(body.get("arguments")), None, kind="tool")
    elif said in ("response.completed", "response.incomplete", "response.failed"):
        response = _table(body.get("response"))
        _take_usage(draft, response.get("usage"))
        draft.done = True
        if said == "response.failed":
            error = _table(response.get("error"))
            fail(draft, "server_error", _text(error.get("message")) or "the response failed")
        elif said == "response.completed":
            set_finish(draft, "stop")
        else:
            set_finish(draft, _table(response.get("incomplete_details")).get("reason"))


def _take_usage(draft: Draft, usage: object) -> None:
    """Take OpenAI's counts, by their older names and by those of the Responses API."""
    if not isinstance(usage, dict):
        return
    for name, other in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        set_count(draft, name, usage.get(name, usage.get(other)))
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    _take_cached(draft, _table(details).get("cached_tokens"))


def _take_cached(draft: Draft, value: object) -> None:
    if value is not None:
        set_count(draft, "cached_prompt_tokens", value)


def _alone(draft: Draft, index: object, choices: int = 1) -> bool:
    """Whether an event belongs to the one answer there should be; else that is the error."""
    if choices == 1 and index in (None, 0):
        return True
    fail(draft, "several_choices", "the stream holds several answers; ask for one (n = 1)")
    return False


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _ids(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= MOST for item in value):
        return tuple(value)
    return None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST else None


def _number(value: object) -> float | None:
    """Return a finite number as a float; JSON as Python reads it also has NaN and huge integers."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST:
        return float(value)
    return None


def _error_text(error: object, data: bytes) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else data.decode("utf-8", "replace")
