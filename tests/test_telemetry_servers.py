"""What servers say in /metrics becomes our names, series and figures; what they do not, nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import Series
from headway.engines.host.metrics import Counts, render
from headway.telemetry import Reading, Watched, figures, series, thinned
from headway.telemetry.servers import QUANTITIES, values

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 640.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 5.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 99.0
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a \\"quoted\\" name, with a comma",tp_rank="0"} 162.0
# TYPE sglang:num_running_reqs_offline_batch gauge
sglang:num_running_reqs_offline_batch{model_name="m"} 5.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 28.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.28
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 8.0e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 7.0e+06
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 1.0e+06
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 2.0e+06
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m"} 4.0
"""
LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 120
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 60
# TYPE llamacpp:prompt_tokens_seconds gauge
llamacpp:prompt_tokens_seconds nan
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 46
# TYPE llamacpp:kv_cache_usage_ratio gauge
llamacpp:kv_cache_usage_ratio nan
"""
TGI = """\
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4
# TYPE tgi_queue_size gauge
tgi_queue_size 7
# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="1"} 0
tgi_request_generated_tokens_sum 8123
tgi_request_generated_tokens_count 44
# TYPE tgi_request_input_length histogram
tgi_request_input_length_sum 500
tgi_request_input_length_count 44
"""
TRTLLM = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{model_name="m"} 6.0
# TYPE trtllm_num_requests_waiting gauge
trtllm_num_requests_waiting{model_name="m"} 2.0
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{model_name="m"} 0.75
# TYPE trtllm_prompt_tokens_total counter
trtllm_prompt_tokens_total{model_name="m"} 100.0
# TYPE trtllm_prompt_cached_tokens_total counter
trtllm_prompt_cached_tokens_total{model_name="m"} 10.0
"""
TRTLLM_JSON = """[
 {"iter": 1, "numActiveRequests": 9, "numQueuedRequests": 1, "kvCacheStats": {"maxNumBlocks": 8}},
 {"iter": 2, "numActiveRequests": 4, "numQueuedRequests": 0,
  "kvCacheStats": {"maxNumBlocks": 200, "usedNumBlocks": 50}}
]"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            VLLM,
            {
                "running": 5,
                "waiting": 1,
                "kv_usage": 0.5,
                "preemptions": 7,
                "prefix_queries": 1000,
                "prefix_hits": 250,
                "spec_drafted": 40,
                "spec_accepted": 30,
                "prompt_tokens": 1500,
                "generation_tokens": 640,
            },
        ),
        (
            SGLANG,
            {
                "running": 162,
                "waiting": 28,
                "kv_usage": 0.28,
                "preemptions": 4,
                "prefix_queries": 8e6,
                "prefix_hits": 2e6,
                "prompt_tokens": 8e6,
                "generation_tokens": 8e6,
            },
        ),
        (
            LLAMA_CPP,
            {"running": 2, "waiting": 46, "prompt_tokens": 120, "generation_tokens": 60},
        ),
        (TGI, {"running": 4, "waiting": 7, "prompt_tokens": 500, "generation_tokens": 8123}),
        (
            TRTLLM,
            {
                "running": 6,
                "waiting": 2,
                "kv_usage": 0.75,
                "prefix_queries": 100,
                "prefix_hits": 10,
                "prompt_tokens": 100,
            },
        ),
        (TRTLLM_JSON, {"running": 4, "waiting": 0, "kv_usage": 0.25}),
    ],
    ids=["vllm", "sglang", "llama_cpp", "tgi", "trtllm", "trtllm_json"],
)
def test_each_server_s_names_become_ours(text, said):
    assert values(text) == said


def test_our_own_host_s_names_are_known():
    counts = Counts()
    counts.add("length", 8, 6)
    stats = {"running": 3, "waiting": 1, "preemptions_total": 2, "kv_usage": 0.5}
    text = render(counts, {**stats, "kv_held_total": 96, "kv_filled_total": 90})
    assert values(text) == {
        "running": 3,
        "waiting": 1,
        "preemptions": 2,
        "kv_usage": 0.5,
        "kv_held": 96,
        "kv_filled": 90,
        "prompt_tokens": 8,
        "generation_tokens": 6,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1]",
        "[{}]",
        "[ not json",
        "<html><body>404</body></html>",
        '{"detail": "Not Found"}',
        "process_cpu_seconds_total 12\n",
        "vllm:num_requests_running{model_name= 3\n",
        "vllm:num_requests_running NaN\n",
    ],
)
def test_what_says_nothing_is_none_and_never_0(text):
    assert values(text) is None


def at(*said: dict[str, float] | None) -> tuple[Reading, ...]:
    """Readings one second apart, the first half a second before the Run."""
    return tuple(Reading(99.5 + k, one) for k, one in enumerate(said))


def named(found: tuple[Series, ...], name: str) -> Series:
    return next(one for one in found if one.name == name)


def test_gauges_are_as_they_were_and_counters_count_from_before_the_run():
    server = at(
        {"running": 0, "generation_tokens": 1000},
        {"running": 4, "generation_tokens": 1010},
        None,
        {"running": 2, "generation_tokens": 1100},
    )
    found = series(Watched(server), 100.0)
    assert named(found, "running") == Series(
        "server", "running", "requests", (-0.5, 0.5, 2.5), (0, 4, 2)
    )
    assert named(found, "generation_tokens").values == (0, 10, 100)
    assert {one.name for one in found} == {"running", "generation_tokens"}
    said = figures(Watched(server), 100.0, 2.0)
    assert said == {
        "server_scrapes": 4,
        "server_scrapes_failed": 1,
        "server_running_max": 4,
        "server_generation_tokens": 100,
    }


def test_a_counter_that_began_anew_counts_what_it_holds_since_then():
    server = at({"preemptions": 10}, {"preemptions": 12}, {"preemptions": 3}, {"preemptions": 4})
    assert named(series(Watched(server), 100.0), "preemptions").values == (0, 2, 5, 6)
    assert figures(Watched(server), 100.0, 3.0)["server_preemptions"] == 6


@pytest.mark.parametrize("missing", [0, 3])
def test_a_counter_whose_ends_were_not_both_read_has_no_growth(missing):
    said = [{"generation_tokens": 10.0 * k} for k in range(4)]
    server = at(*(None if k == missing else one for k, one in enumerate(said)))
    assert "server_generation_tokens" not in figures(Watched(server), 100.0, 3.0)


def test_shares_are_of_what_grew():
    server = at(
        {"prefix_queries": 100, "prefix_hits": 100, "spec_drafted": 5, "spec_accepted": 5}
        | {"kv_held": 10, "kv_filled": 10},
        {"prefix_queries": 300, "prefix_hits": 150, "spec_drafted": 5, "spec_accepted": 5}
        | {"kv_held": 110, "kv_filled": 60},
    )
    said = figures(Watched(server), 100.0, 1.0)
    assert said["server_prefix_hit_rate"] == 0.25
    assert said["server_kv_filled"] == 0.5
    assert "server_spec_acceptance" not in said  # nothing was drafted: not 0


def test_what_was_running_before_the_run_is_no_peak_of_it():
    server = at({"running": 9}, {"running": 2}, {"running": 1})
    assert figures(Watched(server), 100.0, 2.0)["server_running_max"] == 2


def test_a_server_without_metrics_has_none():
    assert series(Watched(), 100.0) == ()
    assert figures(Watched(), 100.0, 2.0) == {}


numbers = st.floats(0, 1e9, allow_nan=False)
readings = st.lists(
    st.one_of(st.none(), st.dictionaries(st.sampled_from([q.name for q in QUANTITIES]), numbers)),
    max_size=12,
)


@given(readings)
def test_series_are_in_order_and_finite_and_counters_never_fall(said):
    for one in series(Watched(at(*said)), 100.0):
        assert one.values
        assert len(one.at_s) == len(one.values)
        assert list(one.at_s) == sorted(set(one.at_s))
        assert all(map(math.isfinite, one.values))
        if next(q for q in QUANTITIES if q.name == one.name).kind == "counter":
            assert one.values[0] == 0
            assert list(one.values) == sorted(one.values)


@given(st.lists(numbers, min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes_in_order(found, most):
    whole = Series("gpu", "power", "W", tuple(float(k) for k in range(len(found))), tuple(found))
    thin = thinned(whole, most)
    assert len(thin.values) <= most
    assert (min(thin.values), max(thin.values)) == (min(found), max(found))
    assert (thin.at_s[0], thin.at_s[-1]) == (0.0, len(found) - 1.0)
    pairs = list(zip(thin.at_s, thin.values, strict=True))
    assert pairs == sorted(set(pairs))
    assert set(pairs) <= set(zip(whole.at_s, whole.values, strict=True))
    if len(found) <= most:
        assert thin == whole
