"""Where requests go, and a request as the bytes that go there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

PRINTABLE = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, from a base URL such as `http://127.0.0.1:8000` or `https://host/api`."""

    host: str
    port: int
    path: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """Read a base URL; raises ValueError with one sentence."""
        try:
            url = urlsplit(base_url)
            port = url.port
        except ValueError as error:
            raise ValueError(f"base_url {base_url!r} is not a URL: {error}") from error
        plain = PRINTABLE.fullmatch(base_url) and not (url.query or url.fragment or url.username)
        if url.scheme not in ("http", "https") or not url.hostname or port == 0 or not plain:
            raise ValueError(f"base_url {base_url!r} must look like http://host:port or .../path")
        port = port or (443 if url.scheme == "https" else 80)
        return cls(url.hostname, port, url.path.rstrip("/"), url.scheme == "https")

    def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str]) -> bytes:
        """Return the whole request as bytes; raises ValueError for a header that is no line."""
        for name, value in headers.items():
            if "\r" in value or "\n" in value:
                raise ValueError(f"the value of the header {name} holds a line end")
        content = json.dumps(body, separators=(",", ":")).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content
