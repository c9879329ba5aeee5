"""What servers understand, by whose they are: for those that we start and those that run already.

Each pins what a model's generation_config.json or the server's own defaults would set otherwise, by
the names and values that this server reads. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.core import Capabilities

# Of OpenAI's own fields these two change greedy output; both are 0 unless somebody says otherwise.
NO_PENALTIES: Mapping[str, object] = {"presence_penalty": 0.0, "frequency_penalty": 0.0}

OPENAI = Capabilities(ids_in=False, ids_out=False, ignore_eos="none", fields=NO_PENALTIES)

# Misspelt fields are taken without a word.
SGLANG = Capabilities(
    logprobs=True,
    fields={
        "return_token_ids": True,
        "repetition_penalty": 1.0,
        **NO_PENALTIES,
        "top_k": -1,
        "min_p": 0.0,
    },
    salt="cache_salt",
)

# The same, and one default more; misspelt ones pass here as well.
VLLM = replace(SGLANG, fields={**SGLANG.fields, "min_tokens": 0})

# Its completions know no salt, and its chat no ids: a field too many is refused.
TENSORRT_LLM = Capabilities(
    cached_tokens=True,
    logprobs=True,
    strict_fields=True,
    fields={"repetition_penalty": 1.0, **NO_PENALTIES, "top_k": 0, "min_p": 0.0},
    completions_fields={"detokenize": False},
)

# Without these it samples from 40 tokens at temperature 0.8; whatever is not named as a sampler is
# not done, but for mirostat, which replaces them. It bans the ends that it is to ignore.
LLAMA_CPP = Capabilities(
    ignore_eos="ban",
    cached_tokens=True,
    fields={"samplers": ["top_k", "temperature", "top_p"], "top_k": 0, "mirostat": 0},
    # At temperature 0 it would compute probabilities of all ids to take the largest.
    greedy_fields={"top_k": 1},
    # Its OpenAI endpoint sends no ids.
    completions="/completion",
    # It says that it keeps a connection, and closes it after each stream.
    keep_alive=False,
)

# Its validation wants top_p below 1.
TGI = Capabilities(
    ids_in=False,
    ids_out=False,
    ignore_eos="none",
    top_p_of_1=False,
    fields={"frequency_penalty": 0.0},
)

DIALECTS: Mapping[str, Capabilities] = {
    "openai": OPENAI,
    "vllm": VLLM,
    "sglang": SGLANG,
    "tensorrt_llm": TENSORRT_LLM,
    # Where it is not ours to start, its prefix cache is left out of each request.
    "llama_cpp": replace(LLAMA_CPP, fields={**LLAMA_CPP.fields, "cache_prompt": False}),
    "tgi": TGI,
}
