"""A process that answers questions about a model: JSON lines in, JSON lines out, in that order.

The first line says that it is ready, and what it has to say besides, or why it is not. It exits
when its standard input closes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from headway.engines.models.folder import ModelError, ModelFolder

Question = Mapping[str, Any]
CarryOut = Callable[[Question], dict[str, Any]]
# Loads what answers; returns what to say with "ready", and the function that answers.
Open = Callable[[ModelFolder, argparse.Namespace], tuple[dict[str, Any], CarryOut]]


class RefusedRequestError(ValueError):
    """A request that has no answer; the message is one sentence for its `error`."""


def answer(carry_out: CarryOut, line: str) -> dict[str, Any]:
    """Return the answer to one line: what carrying it out gave, or an `error` sentence."""
    try:
        request = json.loads(line)
    except ValueError as error:
        return {"id": None, "error": f"the request is not JSON: {error}"}
    if not isinstance(request, dict):
        return {"id": None, "error": "a request is a JSON object"}
    try:
        return {"id": request.get("id"), **carry_out(request)}
    except RefusedRequestError as error:
        return {"id": request.get("id"), "error": str(error)}


def read_ids(request: Question, key: str, vocab_size: int, least: Literal[0, 1] = 1) -> list[int]:
    """Return a list of token ids; raises RefusedRequestError naming what is none."""
    ids = request.get(key)
    if not isinstance(ids, list) or len(ids) < least:
        what = "at least one token id" if least else "token ids"
        raise RefusedRequestError(f"{key} must be a list of {what}")
    for index, id in enumerate(ids):
        if type(id) is not int or not 0 <= id < vocab_size:
            raise RefusedRequestError(
                f"{key}[{index}] must be a token id from 0 to {vocab_size - 1}, not {id!r}"
            )
    return ids


def main(parser: argparse.ArgumentParser, open_model: Open) -> None:
    """Serve stdin until it closes; exit 1 with one sentence when the model cannot be loaded."""
    parser.add_argument("--model-json", required=True, help="the ModelFolder, as JSON")
    arguments = parser.parse_args()
    try:
        folder = ModelFolder.from_json(json.loads(arguments.model_json))
    except (ValueError, TypeError) as error:
        parser.error(f"--model-json: {error}")
    out = _claim_stdout()
    try:
        ready, carry_out = open_model(folder, arguments)
    except ModelError as error:
        _send(out, {"ready": False, "error": str(error)})
        sys.exit(f"headway: {error}")
    _send(out, {"ready": True, **ready})
    for line in sys.stdin:
        if line.strip():
            _send(out, answer(carry_out, line))


def _send(out: TextIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message, allow_nan=False) + "\n")
    out.flush()


def _claim_stdout() -> TextIO:
    """Return a private stdout; what a library prints goes to stderr from here on."""
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private
