"""Servers, ours and others', one module a kind: how each is started, read back, and understood."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.engines.launcher import Launcher
from headway.engines.servers import vllm_hosted, vllm_serve
from headway.engines.servers.elsewhere import http
from headway.engines.servers.given import given
from headway.engines.servers.hosted import HF_NAIVE, HF_STATIC, HOST, OWN, PAGED
from headway.engines.servers.llama_cpp import LLAMA_CPP
from headway.engines.servers.sglang import SGLANG
from headway.engines.servers.tensorrt_llm import TENSORRT_LLM
from headway.engines.servers.transformers_serve import SERVE

# Kinds that have a launcher of their own; of every other our host serves the engine.
LAUNCHERS: Mapping[str, Launcher] = {
    "hf_naive": HF_NAIVE,
    "hf_static": HF_STATIC,
    "paged": PAGED,
    "vllm_serve": vllm_serve.LAUNCHER,
    "vllm": vllm_hosted.LAUNCHER,
    "vllm_offline": vllm_hosted.LAUNCHER,
    "llama_cpp": LLAMA_CPP,
    "sglang": SGLANG,
    "tensorrt_llm": TENSORRT_LLM,
    "transformers_serve": SERVE,
    "http": http({}),
    "command": given({}),
    "image": given({}),
}
# Of these it depends on their arguments what they understand.
SPOKEN: Mapping[str, Callable[[Mapping[str, Any]], Launcher]] = {
    "http": http,
    "command": given,
    "image": given,
}


def launcher_of(kind: str, args: Mapping[str, Any] | None = None) -> Launcher:
    """Return how engines of a kind are started; raises KeyError for a dialect there is not."""
    if kind in SPOKEN:
        return SPOKEN[kind](args or {})
    return OWN if ":" in kind else LAUNCHERS.get(kind, HOST)
