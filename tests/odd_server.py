"""A small OpenAI-compatible server with a prefix cache, which misbehaves as it is told.

`python odd_server.py PORT JSON`, or `serving(**behaviour)` in a thread; loaded by path, as no test
module is. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS, FIRST, VOCABULARY = 1, 10, 1000
KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "stream", "seed", "stream_options"),
    *("return_token_ids", "ignore_eos", "repetition_penalty", "logit_bias", "logprobs"),
    *("cache_salt", "top_k"),
}


@dataclass
class Behaviour:
    """What this server does. Tokens are a hash of the prompt; one of them may be the end mark."""

    ids: bool = True  # return_token_ids has an effect
    usage: bool = True
    more_prompt_tokens: int = 0
    ignore_eos: str = "emit"  # or ban; or ignored
    eos_at: int | None = None  # where the model itself ends
    bias: bool = True
    logprobs: bool = False
    penalty: float = 1.0  # the default of repetition_penalty; what it changes is every third token
    refuses: tuple[str, ...] = ()
    names_what: bool = True  # a refusal says which field it is about
    status: int = 400
    block_tokens: int = 16
    salted: bool = True
    tells_cached: bool = True
    reset_status: int = 200
    token_s: float = 0.0
    dies_of: str | None = None
    hangs_on: str | None = None
    cache: set[bytes] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def tokens(self, body: dict[str, Any]) -> list[int]:
        prompt, most = body["prompt"], body["max_tokens"] or 16
        seed = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=64).digest()
        made = [FIRST + seed[k % 64] * (k + 3) % (VOCABULARY - FIRST) for k in range(most)]
        if body.get("repetition_penalty", self.penalty) != 1.0:
            made = [t + 1 if k % 3 == 0 and t + 1 < VOCABULARY else t for k, t in enumerate(made)]
        goes_on = body.get("ignore_eos", False) and self.ignore_eos != "ignored"
        if self.eos_at is not None and self.eos_at < most:
            made[self.eos_at] = EOS
        for name in body.get("logit_bias", {}) if self.bias else ():
            made = [int(name)] * most
        if goes_on and self.ignore_eos == "ban":
            return [FIRST if token == EOS else token for token in made]
        return made if goes_on or EOS not in made else made[: made.index(EOS)]

    def cached(self, body: dict[str, Any]) -> int:
        """Look a prompt up by whole blocks, each named by all before it, and keep it."""
        salt = body.get("cache_salt", "") if self.salted else ""
        ids, size, found, so_far = body["prompt"], self.block_tokens, 0, salt.encode()
        misses = False
        for end in range(size, len(ids) + 1, size):
            so_far = hashlib.blake2b(so_far + json.dumps(ids[end - size : end]).encode()).digest()
            misses = misses or so_far not in self.cache
            found += 0 if misses else size
            self.cache.add(so_far)
        # The last token's step is what gives the first output.
        return min(found, (len(ids) - 1) // size * size)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": "fake"}]}
        self.answer(200, json.dumps(models if self.path == "/v1/models" else {}).encode())

    def do_POST(self) -> None:
        does, content = self.behaviour, self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/reset":
            if does.reset_status == 200:
                does.cache.clear()
            self.answer(does.reset_status, b"cache flushed\n")
            return
        body = json.loads(content)
        does.bodies.append(body)
        if does.dies_of in body:
            os._exit(3)
        if does.hangs_on in body:
            time.sleep(30)
        unknown = "*" in does.refuses and body.keys() - KNOWN
        refused = [name for name in body if name in does.refuses or (unknown and name in unknown)]
        if refused:
            said = f"unknown field {', '.join(refused)}" if does.names_what else "bad request"
            self.answer(does.status, json.dumps({"error": said}).encode())
        else:
            self.stream(body)

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, body: dict[str, Any]) -> None:
        does, made, cached = (
            self.behaviour,
            self.behaviour.tokens(body),
            self.behaviour.cached(body),
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for token in made:
            time.sleep(does.token_s)
            choice: dict[str, Any] = {"index": 0, "text": "" if token == EOS else f"<{token}>"}
            choice["finish_reason"] = None
            if does.ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if does.logprobs and body.get("logprobs"):
                choice["logprobs"] = {"token_logprobs": [0.0]}
            self.event({"choices": [choice]})
        whole = len(made) == (body["max_tokens"] or 16)
        finish = "length" if whole else "stop"
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
        if does.usage and body.get("stream_options"):
            prompt = len(body["prompt"]) + does.more_prompt_tokens
            usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": len(made)}
            if does.tells_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, body: dict[str, Any]) -> None:
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


def made(port: int, behaviour: Behaviour) -> Server:
    return Server(("127.0.0.1", port), type("Odd", (Handler,), {"behaviour": behaviour}))


@contextlib.contextmanager
def serving(**behaviour: Any) -> Iterator[tuple[str, Behaviour]]:
    """Serve in a thread; yields the base URL, and what was asked in `bodies`."""
    does = Behaviour(**behaviour)
    server = made(0, does)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", does
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    made(int(sys.argv[1]), Behaviour(**json.loads(sys.argv[2]))).serve_forever()
