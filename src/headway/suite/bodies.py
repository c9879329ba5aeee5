"""A file of OpenAI requests: one JSON object a line, sent as it is."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.core import Request
from headway.tables import SuiteError, json_lines
from headway.workload import Bodies

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
LIMITS = ("max_completion_tokens", "max_tokens")


def read_bodies(path: Path) -> Bodies:
    """Check a file and say what it holds; raises SuiteError naming the file and line."""
    data = _data(path)
    count = sum(1 for _ in _requests(path, data))
    if not count:
        raise SuiteError(f"{path} holds no request")
    return Bodies(str(path), hashlib.sha256(data).hexdigest(), count)


@functools.lru_cache(maxsize=4)
def requests_in(bodies: Bodies) -> tuple[Request, ...]:
    """Return the requests of a file that was checked; raises SuiteError if it is another by now."""
    path = Path(bodies.path)
    data = _data(path)
    if hashlib.sha256(data).hexdigest() != bodies.sha256:
        raise SuiteError(f"{path} has changed since this night began: its requests are others")
    return tuple(_requests(path, data))


def _data(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}") from error


def _requests(path: Path, data: bytes) -> Iterator[Request]:
    for index, (number, given) in enumerate(json_lines(path, data.split(b"\n"))):
        yield _request(f"{path} line {number}", index, given)


def _request(where: str, index: int, given: Any) -> Request:
    """Read a body by itself, or one in the lines of OpenAI's batch files (`url`, `body`)."""
    if not isinstance(given, dict):
        raise SuiteError(f"{where} is {type(given).__name__}; it must be an object")
    batch = "body" in given
    body = given["body"] if batch else given
    if not isinstance(body, dict):
        raise SuiteError(f"{where}: body is {type(body).__name__}; it must be an object")
    if ("messages" in body) == ("prompt" in body):
        raise SuiteError(f"{where} must have messages (chat) or prompt (completions), one of them")
    own = ENDPOINTS["messages" in body]
    endpoint = given.get("url", own) if batch else own
    if endpoint != own:
        raise SuiteError(f"{where}: url is {endpoint!r}; what its body holds goes to {own}")
    if body.get("n", 1) != 1:
        raise SuiteError(f"{where}: n is {body['n']!r}; one answer a request is measured")
    return Request(
        index=index,
        prompt_token_ids=(),
        max_tokens=_limit(where, body),
        ignore_eos=body.get("ignore_eos") is True,
        body=json.dumps(body, ensure_ascii=False, separators=(",", ":")),
        endpoint=endpoint,
    )


def _limit(where: str, body: Mapping[str, Any]) -> int | None:
    for key in LIMITS:
        limit = body.get(key)
        if limit is not None:
            if type(limit) is not int or limit < 1:
                raise SuiteError(f"{where}: {key} is {limit!r}; it must be a whole number above 0")
            return limit
    return None
