"""What must not leave the machine with a report: secrets, the user's home, the host's name.

Works on free text and on settings, never on the names that results are joined by.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = "(hidden)"
MAX_TEXT = 600
_SECRET_ENDS = frozenset(
    ("key", "apikey", "token", "auth", "authorization", "credential", "credentials")
)
_SECRET_WORDS = frozenset(("secret", "password", "passwd", "passphrase", "cookie"))
_HOME = re.compile(r"(?:/home|/Users)/[^/\s'\":]+|/root(?=/|$)")
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
# What follows `hf_` in a key is letters and digits alone: `hf_static-w128_64-c8` is a cell's name.
_KNOWN_KEYS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|(?:hf_|ghp_)[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,})"
)


@dataclass(frozen=True, slots=True)
class Private:
    """What to look for besides what looks like a secret anywhere."""

    home: str | None = None
    host: str | None = None

    def text(self, text: str) -> str:
        """Return a free text without home, host name and secrets, cut at 600 characters."""
        if self.home and len(self.home) > 1:
            text = re.sub(re.escape(self.home.rstrip("/")) + r"(?=/|\b|$)", "~", text)
        text = _BEARER.sub(rf"\1 {HIDDEN}", _USERINFO.sub("", _HOME.sub("~", text)))
        text = _KNOWN_KEYS.sub(HIDDEN, text)
        if self.host:
            text = re.sub(rf"(?<![\w.-]){re.escape(self.host)}(?![\w-])", "(host)", text)
        text = text.encode("utf-8", "replace").decode("utf-8")
        return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [...]"

    def texts(self, texts: Iterable[str]) -> tuple[str, ...]:
        """Return each free text as `text` does."""
        return tuple(self.text(text) for text in texts)

    def value(self, value: object, name: str = "") -> Any:
        """Return a setting as JSON values; what its name says is secret is hidden."""
        if isinstance(value, Mapping):
            return {str(key): self.value(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return self._list(value, name)
        if isinstance(value, bool | int) or value is None:
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        flag, equals, _ = str(value).partition("=")
        if equals and flag.startswith("-") and is_secret(flag):
            return f"{flag}={HIDDEN}"
        return HIDDEN if is_secret(name) else self.text(str(value))

    def _list(self, values: Iterable[object], name: str) -> list[Any]:
        """Hide also what follows a flag such as --api-key."""
        shown: list[Any] = []
        for value in values:
            shown.append(self.value(value, name))
            name = value if isinstance(value, str) and value.startswith("-") else ""
        return shown


def here() -> Private:
    """Return what is private on this machine."""
    host = platform.node().partition(".")[0]
    # A short or common host name is also an ordinary word, and hiding it would hide that word.
    known = host if len(host) >= 5 and host != "localhost" else None
    return Private(os.environ.get("HOME"), known)


def is_secret(name: str) -> bool:
    """Whether a setting's name says that its value is a secret: HF_TOKEN, --api-key, apiKey."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    return bool(words) and (words[-1] in _SECRET_ENDS or not _SECRET_WORDS.isdisjoint(words))
