"""vLLM as a library, behind our own host: AsyncLLM (`vllm`) and LLM.generate (`vllm_offline`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.engines.launcher import Launcher, LaunchSpec
from headway.engines.servers.hosted import CAN, hosted
from headway.engines.servers.vllm_serve import EQUAL
from headway.engines.servers.vllm_surroundings import surroundings


def env(spec: LaunchSpec) -> Mapping[str, str]:
    """Return what both processes of the host, and vLLM's own, find around them."""
    return surroundings(spec, LAUNCHER.arguments(spec))


LAUNCHER: Launcher = hosted(
    replace(CAN, steps=False, cached_tokens=True, salt="cache_salt"), EQUAL, env
)
