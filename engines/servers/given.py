"""Kinds `command` and `image`: whatever ends up serving, started as the suite says.

    args = { command = ["my-server", "--port", "{port}", "--model", "{model_path}"] }

A `command` is the whole of it; of an `image` it is what follows the image's own entrypoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.engines.launcher import Launcher, LaunchError, LaunchSpec, weights
from headway.engines.servers.elsewhere import http

PLACEHOLDERS = ("port", "model_path", "served_name", "dtype", "device")
_PLACE = re.compile(r"\{(\w+)\}")


def unknown_placeholder(words: list[str]) -> str | None:
    """Return the first placeholder that stands for nothing, or None."""
    names = (name for word in words for name in _PLACE.findall(word))
    return next((name for name in names if name not in PLACEHOLDERS), None)


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the suite's command with what stands for something put in."""
    words = [str(word) for word in spec.args.get("command", [])]
    unknown = unknown_placeholder(words)
    if unknown is not None:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        message = f"{spec.instance}: args.command has {{{unknown}}}; there are {known}"
        raise LaunchError("no_such_placeholder", message)
    values = {"port": str(port), "served_name": spec.served_name}
    values |= {"dtype": spec.dtype, "device": spec.device}

    def put(match: re.Match[str]) -> str:
        name = match[1]
        return weights(spec) if name == "model_path" else values[name]

    return [_PLACE.sub(put, word) for word in words]


def given(args: Mapping[str, Any]) -> Launcher:
    """Return how it is started; raises KeyError for a dialect there is not."""
    health = str(args.get("health", "/health"))
    return replace(http(args), command=command, health=health, image=True)
