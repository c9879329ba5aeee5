"""What both engines on vLLM share: its arguments, a request in its words, who it is, its gauges."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import pydantic
import torch
import transformers
import vllm
from vllm import SamplingParams
from vllm import envs as vllm_envs
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import get_metrics_snapshot

from headway.core import EngineInfo, FinishReason
from headway.engines.contract import Output, Submission
from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.servers.vllm_readback import device_of, dtype_of, settings_of
from headway.engines.servers.vllm_surroundings import THREADS
from headway.engines.supervise import descendants

# What vLLM calls its gauges and counters, and what our host does.
STATS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions": "preemptions_total",
    "vllm:prefix_cache_queries": "prefix_queries_total",
    "vllm:prefix_cache_hits": "prefix_hits_total",
}
FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

Args = TypeVar("Args")


def arguments(
    kind: str, made: type[Args], folder: ModelFolder, dtype: str, given: Mapping[str, object]
) -> Args:
    """Return vLLM's own arguments (`EngineArgs` or its like) for a model, and what is given.

    Ids go in and out, so no tokenizer is loaded. `threads` has done its work before this process
    began. Raises ValueError for a name vLLM does not have, ModelError for a model without weights.
    """
    if folder.synthetic:
        raise ModelError(f"{kind} reads a model's weights from disk, and {folder.name} has none")
    own = {name: value for name, value in given.items() if name != THREADS}
    known = {field.name for field in fields(made)}  # type: ignore[arg-type]
    for name in own:
        if name not in known:
            raise ValueError(
                f"{kind} has no argument {name!r}; it takes those of vLLM's EngineArgs"
            )
    defaults = {
        "model": str(folder.path),
        "served_model_name": folder.name,
        "dtype": dtype,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    return made(**(defaults | own))


def config_json(config: VllmConfig) -> dict[str, Any]:
    """Return a configuration as JSON values, as /server_info of vLLM's own server does."""
    dumped: dict[str, Any] = pydantic.TypeAdapter(VllmConfig).dump_python(
        config, mode="json", fallback=str
    )
    return dumped


def describe(kind: str, config: VllmConfig, more: Mapping[str, object]) -> EngineInfo:
    """Return who runs in this process and those that it started."""
    said = config_json(config)
    names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")
    environ = {name: getattr(vllm_envs, name, None) for name in names}
    pids = [os.getpid(), *descendants(os.getpid())]
    return EngineInfo(
        kind=kind,
        version=vllm.__version__,
        model=str(said["model_config"]["served_model_name"]),
        dtype=dtype_of(said),
        device=device_of(said),
        settings={**settings_of(said, environ, pids), **more},
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def prompt(submission: Submission) -> dict[str, Any]:
    """Return a request's prompt in vLLM's words."""
    ids = {"prompt_token_ids": list(submission.prompt_token_ids)}
    return ids if submission.salt is None else {**ids, "cache_salt": submission.salt}


def sampling(
    submission: Submission, eos_ids: Collection[int], kind: RequestOutputKind
) -> SamplingParams:
    """Return how a request is sampled. Ids that end an answer are said, not taken from a tokenizer.

    Raises ValueError for what vLLM does not take.
    """
    return SamplingParams(
        max_tokens=submission.max_tokens,
        temperature=submission.temperature,
        top_p=submission.top_p,
        seed=submission.seed,
        ignore_eos=submission.ignore_eos,
        stop_token_ids=[] if submission.ignore_eos else list(eos_ids),
        detokenize=False,
        output_kind=kind,
    )


def output(submission_id: int, said: RequestOutput) -> Output:
    """Return what vLLM says of a request, in our words."""
    completion = said.outputs[0]
    token_ids = tuple(completion.token_ids)
    if not said.finished:
        return Output(submission_id, token_ids)
    reason = FINISHED.get(str(completion.finish_reason), "error")
    error = f"vLLM ended it: {completion.finish_reason}" if reason == "error" else None
    return Output(submission_id, token_ids, reason, error, cached=said.num_cached_tokens)


def stats() -> dict[str, float]:
    """Return vLLM's gauges and counters, as its /metrics would, under our names."""
    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        name = STATS.get(metric.name.removesuffix("_total"))
        value = getattr(metric, "value", None)
        if name is not None and value is not None:
            found[name] = found.get(name, 0.0) + float(value)
    return found
