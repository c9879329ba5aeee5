"""Serve an engine behind an OpenAI-compatible endpoint.

    python boot.py headway.engines.host KIND --model-json JSON --served-name NAME --port N

KIND is hf_naive, hf_static, vllm, vllm_offline, fake, or `package.module:Class` for an engine of
your own, found from the current directory and called as Class(model_folder, dtype, device, **args).
The port answers at once; /health is 200 when the engine can serve. SIGTERM ends everything with
status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.engines import fake
from headway.engines.contract import Backend
from headway.engines.host.async_loop import loop_factory
from headway.engines.host.front import Front, Limits, Tokenizer
from headway.engines.host.http import Connection
from headway.engines.host.process import ProcessBackend
from headway.engines.models.folder import ModelFolder

BOOT = Path(__file__).resolve().parents[1] / "boot.py"
BACKLOG = 2048
# Between the last errors on open streams and the end of the process.
PARTING_S = 0.5


def main() -> None:
    """Serve what the arguments name; exit 0 after a signal, 1 when the engine ends, 2 for usage."""
    given = _parser().parse_args()
    try:
        folder = _read_model(given.model_json)
        args = _read_object("--args", given.args)
        plan = fake.FakePlan.from_args(args) if given.kind == "fake" else None
    except ValueError as error:
        sys.stderr.write(f"headway host: {error}\n")
        sys.exit(2)
    extra: dict[str, Callable[[], object]] = {}
    served_name = given.served_name or folder.name
    if plan is not None:
        one = fake.FakeBackend(plan, model=served_name)
        backend: Backend = one
        extra["/headway/truth"] = one.truth
        served_name = plan.served_name(served_name)
    else:
        backend = ProcessBackend(_engine_command(given, folder))
    limits = Limits(folder.vocab_size, folder.context_length, given.max_unfinished)
    other = plan is not None and plan.other_tokenizer
    front = Front(backend, lambda: _load_tokenizer(folder, other), served_name, limits, extra)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        cause = runner.run(serve(front, backend, given))
    if cause is not None:
        sys.stderr.write(f"headway host: {cause}\n")
        sys.exit(1)


async def serve(front: Front, backend: Backend, given: argparse.Namespace) -> str | None:
    """Listen, load and serve; return why the engine ended, or None after a signal."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    connections: set[Connection] = set()
    try:
        server = await loop.create_server(
            lambda: Connection(front.handle, connections, given.max_body_bytes),
            given.host,
            given.port,
            backlog=BACKLOG,
        )
    except OSError as error:
        return f"cannot listen on {given.host} port {given.port}: {error.strerror or error}"
    port = server.sockets[0].getsockname()[1]
    sys.stderr.write(f"headway host: listening on http://{given.host}:{port}\n")
    sys.stderr.flush()
    life = loop.create_task(front.live())
    waiting = loop.create_task(stopped.wait())
    try:
        await asyncio.wait({life, waiting}, return_when=asyncio.FIRST_COMPLETED)
        cause = _cause(life) if not stopped.is_set() else None
        if cause is not None:
            await asyncio.sleep(PARTING_S)
        return cause
    finally:
        server.close()
        for task in (life, waiting):
            task.cancel()
        await backend.close()
        for connection in list(connections):
            connection.close()


def _cause(life: asyncio.Task[str]) -> str:
    error = life.exception()
    if isinstance(error, RuntimeError):
        return str(error)
    return life.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headway.engines.host", description="Serve an engine.")
    parser.add_argument("kind", help="a kind of engine, or package.module:Class")
    parser.add_argument("--model-json", default='{"name": "fake"}', help="a ModelFolder as JSON")
    parser.add_argument("--served-name", help="the model's name for clients (default: its own)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--max-unfinished", type=int, default=512, help="more are refused (429)")
    parser.add_argument("--max-body-bytes", type=int, default=32 * 1024 * 1024)
    parser.add_argument("--args", default="{}", help="the engine's arguments as a JSON object")
    return parser


def _read_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, not {text}")
    return value


def _read_model(text: str) -> ModelFolder:
    fields = _read_object("--model-json", text)
    if fields.get("name") == fake.MODEL["name"]:
        fields = {**fake.MODEL, **fields}
    return ModelFolder.from_json(fields)


def _engine_command(given: argparse.Namespace, folder: ModelFolder) -> list[str]:
    options = {"model-json": json.dumps(folder.to_json()), "args": given.args}
    options |= {"dtype": given.dtype, "device": given.device}
    named = [text for name, value in options.items() for text in (f"--{name}", value)]
    return [sys.executable, str(BOOT), "headway.engines.host.loop", given.kind, *named]


def _load_tokenizer(folder: ModelFolder, other: bool) -> Tokenizer:
    if folder.name == fake.MODEL["name"]:
        return fake.FakeTokenizer(all_bytes=other)
    from headway.engines.models.tokenizer import load_tokenizer  # needs the tokenizers library

    return load_tokenizer(folder)


if __name__ == "__main__":
    main()
