"""`transformers serve` as it is, which can also be asked who it is.

    python boot.py headway.engines.hf.serve --model-json '{…}' [--more '{…}'] [its own flags]

The server names its settings nowhere, calls a model by the folder it lies in, lists only what is in
the hub's cache, and keeps a prefix cache that nothing empties. So the model lies in a folder of its
own name here, and there are three more routes: GET /headway/info and /headway/models, and POST
/headway/reset. Requests go through its own code alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cli.serving import server
from transformers.cli.transformers import app as command_line

from headway.core import EngineInfo
from headway.engines.models.folder import ModelFolder

KIND = "transformers_serve"


def info(model: Any, folder: ModelFolder, batching: Any) -> EngineInfo:
    """Return what is running, read back from the model and its continuous batching (None: none).

    That begins with the first request.
    """
    settings: dict[str, object] = {
        "attention": model.config._attn_implementation,
        "continuous_batching": batching is not None,
        "max_model_len": getattr(model.config, "max_position_embeddings", None),
        "model_revision": folder.revision,
        "prefix_caching": False,
        "threads": torch.get_num_threads(),
    }
    if batching is not None:
        asked, cache = batching.continuous_batching_config, batching.batch_processor.cache
        settings |= {
            "async_batching": asked.use_async_batching,
            "cuda_graphs": any(asked.cuda_graph_booleans),
            "max_num_batched_tokens": asked.max_batch_tokens,
            "max_num_seqs": asked.max_requests_per_batch,
            "num_blocks": asked.num_blocks,
            "page_size": asked.page_size,
            "prefix_caching": cache.use_prefix_sharing,
        }
    return EngineInfo(
        kind=KIND,
        version=transformers.__version__,
        model=folder.name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        settings=settings,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def extended(folder: ModelFolder, more: Mapping[str, Any]) -> Any:
    """Return the server's `build_server` with our routes, whose batching is configured by `more`.

    `more` holds fields of its ContinuousBatchingConfig for which its command line has no flag.
    """
    build = server.build_server

    def build_server(manager: Any, *handlers: Any, generation_state: Any, **others: Any) -> Any:
        app = build(manager, *handlers, generation_state=generation_state, **others)
        if more:
            config = generation_state._cb_config or transformers.ContinuousBatchingConfig()
            generation_state._cb_config = replace(config, **more)

        def batching() -> Any:
            made = generation_state._cb_manager
            return None if made is None else made._cb

        def loaded() -> dict[str, Any]:
            return {name.partition("@")[0]: one for name, one in manager.loaded_models.items()}

        def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": name} for name in loaded()]}

        def describe() -> dict[str, Any]:
            return asdict(info(loaded()[folder.name].model, folder, batching()))

        def reset() -> dict[str, Any]:
            """Empty the prefix cache; say whether there was anything in it."""
            found = batching()
            if found is None:
                return {"emptied": False}
            with found.pause():
                return {"emptied": found.batch_processor.cache.evict_cached_blocks()}

        app.add_api_route("/headway/models", models)
        app.add_api_route("/headway/info", describe)
        app.add_api_route("/headway/reset", reset, methods=["POST"])
        return app

    return build_server


@contextmanager
def beside(folder: ModelFolder) -> Iterator[None]:
    """Have the model in the working directory, in a folder of its own name."""
    with tempfile.TemporaryDirectory(prefix="headway-") as here:
        link = Path(here, folder.name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder.path.absolute(), target_is_directory=True)
        os.chdir(here)
        yield


def main() -> None:
    """Serve until a signal; whatever threads are left then end with the process."""
    parser = argparse.ArgumentParser(prog="headway.engines.hf.serve", description=__doc__)
    parser.add_argument("--model-json", required=True, help="the ModelFolder, as JSON")
    parser.add_argument("--more", default="{}", help="fields of its ContinuousBatchingConfig")
    parser.add_argument("--threads", type=int, help="threads of the CPU")
    ours, theirs = parser.parse_known_args()
    folder = ModelFolder.from_json(json.loads(ours.model_json))
    if ours.threads is not None:
        torch.set_num_threads(ours.threads)
    server.build_server = extended(folder, json.loads(ours.more))
    # Its web server raises the signal that ended it once more.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    status: Any = 1
    try:
        with beside(folder):
            command_line(["serve", folder.name, *theirs])
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Its generation thread is waited for otherwise, and nothing tells that to end.
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


if __name__ == "__main__":
    main()
