"""What servers call the figures of their /metrics, and what they say in one answer of it.

The names are those of vLLM 0.32 (and of its older releases, which put `gpu_` before some), SGLang
0.5, llama.cpp's llama-server, TGI 3, TensorRT-LLM 1.2 and of our own host. `transformers serve`
and Ollama have no /metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure by our name. A server of several engines has it several times: all are `together`.

    `theirs` are names of samples (with `_total` or `_sum` at their end); the first one that an
    answer has is read.
    """

    name: str
    unit: str
    kind: Literal["gauge", "counter"]
    theirs: Sequence[str]
    together: Callable[[Iterable[float]], float] = math.fsum


QUANTITIES = (
    Quantity(
        "running",
        "requests",
        "gauge",
        (
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "llamacpp:requests_processing",
            "tgi_batch_current_size",
            "trtllm_num_requests_running",
            "trtllm_num_active_requests",
            "headway:num_requests_running",
        ),
    ),
    Quantity(
        "waiting",
        "requests",
        "gauge",
        (
            "vllm:num_requests_waiting",
            "sglang:num_queue_reqs",
            "llamacpp:requests_deferred",
            "tgi_queue_size",
            "trtllm_num_requests_waiting",
            "trtllm_server_queue_length",
            "headway:num_requests_waiting",
        ),
    ),
    Quantity(  # called a percentage by some, and a share of 1 in all of them
        "kv_usage",
        "1",
        "gauge",
        (
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "sglang:token_usage",
            "llamacpp:kv_cache_usage_ratio",
            "trtllm_kv_cache_utilization",
            "headway:kv_usage",
        ),
        max,
    ),
    Quantity(
        "preemptions",
        "requests",
        "counter",
        (
            "vllm:num_preemptions_total",
            "sglang:num_retracted_requests_total",
            "headway:preemptions_total",
        ),
    ),
    Quantity(
        "prefix_queries",
        "tokens",
        "counter",
        (
            "vllm:prefix_cache_queries_total",
            "vllm:gpu_prefix_cache_queries_total",
            "sglang:prompt_tokens_total",
            "trtllm_prompt_tokens_total",
            "headway:prefix_queries_total",
        ),
    ),
    Quantity(
        "prefix_hits",
        "tokens",
        "counter",
        (
            "vllm:prefix_cache_hits_total",
            "vllm:gpu_prefix_cache_hits_total",
            "sglang:cached_tokens_total",
            "trtllm_prompt_cached_tokens_total",
            "headway:prefix_hits_total",
        ),
    ),
    # Room for so many tokens is held, and so many tokens it is for, summed over passes.
    Quantity("kv_held", "tokens", "counter", ("headway:kv_held_total",)),
    Quantity("kv_filled", "tokens", "counter", ("headway:kv_filled_total",)),
    Quantity(
        "spec_drafted",
        "tokens",
        "counter",
        (
            "vllm:spec_decode_num_draft_tokens_total",
            "llamacpp:spec_decode_num_draft_tokens_total",
            "trtllm_spec_decode_num_draft_tokens_total",
            "trtllm_spec_decode_drafted_tokens_total",
        ),
    ),
    Quantity(
        "spec_accepted",
        "tokens",
        "counter",
        (
            "vllm:spec_decode_num_accepted_tokens_total",
            "llamacpp:spec_decode_num_accepted_tokens_total",
            "trtllm_spec_decode_num_accepted_tokens_total",
            "trtllm_spec_decode_accepted_tokens_total",
        ),
    ),
    Quantity(
        "prompt_tokens",
        "tokens",
        "counter",
        (
            "vllm:prompt_tokens_total",
            "sglang:prompt_tokens_total",
            "llamacpp:prompt_tokens_total",
            "tgi_request_input_length_sum",
            "trtllm_prompt_tokens_total",
            "headway:prompt_tokens_total",
        ),
    ),
    Quantity(
        "generation_tokens",
        "tokens",
        "counter",
        (
            "vllm:generation_tokens_total",
            "sglang:generation_tokens_total",
            "llamacpp:tokens_predicted_total",
            "tgi_request_generated_tokens_sum",
            "trtllm_generation_tokens_total",
            "headway:generation_tokens_total",
        ),
    ),
)
_KNOWN = tuple(sorted({name for quantity in QUANTITIES for name in quantity.theirs}))


def values(text: str) -> dict[str, float] | None:
    """Return what an answer of /metrics says, by our names; None where it says nothing of it.

    What is not a number is left out: undefined is not there, never NaN.
    """
    found = _iterations(text) if text.lstrip().startswith("[") else _exposition(text)
    finite = {name: value for name, value in found.items() if math.isfinite(value)}
    return finite or None


def _exposition(text: str) -> dict[str, float]:
    # Importing it takes a tenth of a second; a plugin that measures nothing must not pay that.
    from prometheus_client.parser import text_string_to_metric_families

    # Of the thousands of lines that some have, a handful is asked for.
    lines = [line for line in text.splitlines() if line.startswith(_KNOWN)]
    samples: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.value)
    except ValueError:
        return {}  # a page that only looks like one
    found = {}
    for quantity in QUANTITIES:
        # Of two names for one thing, some releases have both.
        name = next((name for name in quantity.theirs if name in samples), None)
        if name is not None:
            found[quantity.name] = quantity.together(samples[name])
    return found


def _iterations(text: str) -> dict[str, float]:
    """Read TensorRT-LLM's own /metrics: its iterations since it was last asked, the last one last.

    What it would add up to is not in it: only gauges are.
    """
    try:
        last = json.loads(text)[-1]
    except (ValueError, IndexError, KeyError, TypeError):
        return {}
    if not isinstance(last, Mapping):
        return {}
    found = {"running": last.get("numActiveRequests"), "waiting": last.get("numQueuedRequests")}
    cache: Any = last.get("kvCacheStats")
    if isinstance(cache, Mapping) and cache.get("maxNumBlocks"):
        found["kv_usage"] = _ratio(cache.get("usedNumBlocks"), cache["maxNumBlocks"])
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _ratio(part: Any, whole: Any) -> float | None:
    numbers = isinstance(part, int | float) and isinstance(whole, int | float)
    return part / whole if numbers else None
