"""`transformers serve` with continuous batching, in the environment of transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headway.core import Capabilities
from headway.engines.launcher import HERE, Launcher, LaunchSpec, flags, weights
from headway.engines.servers.hosted import info

if TYPE_CHECKING:
    from collections.abc import Mapping

# Fields of its ContinuousBatchingConfig for which its command line has no flag.
MORE = (
    "allow_block_sharing",
    "auto_switch_to_flash",
    "max_requests_per_batch",
    "use_async_batching",
)
# Without these it takes 90 % of a CPU's memory for its cache, and attends to 8,192 tokens at once.
ON_CPU: Mapping[str, Any] = {"cb_num_blocks": 64, "cb_max_batch_tokens": 1024}


def command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command of the server in the company that tells who it is."""
    weights(spec)
    asked = dict(SERVE.arguments(spec))
    # Where it finds flash attention it takes that, which float32 does not have.
    asked = ({"auto_switch_to_flash": False} if spec.dtype == "float32" else {}) | asked
    more = {name: asked.pop(name) for name in MORE if name in asked}
    usual = {"continuous_batching": True, **(ON_CPU if spec.device == "cpu" else {})}
    return [
        spec.executable,
        str(HERE / "boot.py"),
        "headway.engines.hf.serve",
        *("--model-json", json.dumps(dict(spec.model))),
        *(("--more", json.dumps(more)) if more else ()),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", spec.dtype, "--device", spec.device),
        *flags({**usual, **asked}),
    ]


def env(spec: LaunchSpec) -> Mapping[str, str]:
    """Keep it off the network: it would look for a newer version, and for kernels."""
    return {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}


SERVE = Launcher(
    command,
    info,
    Capabilities(
        ids_in=False,
        ids_out=False,
        strict_fields=True,
        sampling=False,
        # Its repetition penalty is 1 more than this, whatever the model's own configuration says.
        fields={"frequency_penalty": 0},
        # No end: no token has this id.
        past_end={"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1})},
    ),
    env=env,
    models="/headway/models",
    reset="/headway/reset",
    equal={
        "max_num_seqs": "max_requests_per_batch",
        "max_num_batched_tokens": "cb_max_batch_tokens",
        "prefix_caching": "allow_block_sharing",
        "threads": "threads",
    },
)
