"""A Run is invalid where its server contradicts the client, or its GPU was not as it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway import metrics, validity
from headway.core import Case, Level, RequestError, RequestRecord, Run, Series, TokenEvent
from headway.suite import Limit

TOKENS, SLOTS, TTFT_S, ITL_S = 16, 4, 0.0625, 0.0625
SERVICE_S = TTFT_S + (TOKENS - 1) * ITL_S


def answered(index: int, **changes: object) -> RequestRecord:
    due_s = index // SLOTS * SERVICE_S
    times = [due_s + TTFT_S + k * ITL_S for k in range(TOKENS)]
    made = RequestRecord(
        index=index,
        due_s=due_s,
        sent_s=due_s,
        ended_s=times[-1],
        events=tuple(TokenEvent(at_s, "x", (k,), 1) for k, at_s in enumerate(times)),
        asked_tokens=TOKENS,
        asked_prompt_tokens=32,
        prompt_tokens=32,
        completion_tokens=TOKENS,
        finish_reason="length",
    )
    return replace(made, **changes)


def run_of(records: list[RequestRecord] | None = None, **changes: object) -> Run:
    records = records or [answered(k) for k in range(16)]
    level = Level("c4", len(records), concurrency=SLOTS)
    span_s = max(one.ended_s or 0.0 for one in records)
    run = Run(Case("a", "m", "w", "c4"), 1, 1, level, "", span_s, tuple(records), "", "")
    return replace(run, **changes)


def seen(running: list[float], waiting: list[float] | None = None) -> tuple[Series, ...]:
    """What /metrics said just before the Run, once a second in it, and just after it."""
    times = (-0.1, *(0.9 + k for k in range(len(running) - 2)), 4.05)
    found = [Series("server", "running", "requests", times, tuple(running))]
    if waiting is not None:
        found.append(Series("server", "waiting", "requests", times, tuple(waiting)))
    return tuple(found)


@pytest.mark.parametrize(
    ("running", "waiting", "invalid"),
    [
        ([0, 4, 4, 4, 0], [0, 0, 0, 0, 0], False),
        ([0, 2, 2, 2, 0], [0, 2, 2, 2, 0], False),
        ([0, 4, 4, 4, 0], [0, 1, 0, 0, 0], False),  # the end of one and the start of the next
        ([9, 4, 4, 4, 9], [0, 0, 0, 0, 0], False),  # before and after it
        ([0, 4, 4, 4, 0], [0, 1, 1, 0, 0], True),
        ([0, 5, 4, 6, 0], None, True),
        ([0, 0, 0, 0, 0], None, False),
    ],
)
def test_more_requests_than_the_client_had_are_somebody_else_s(running, waiting, invalid):
    found = validity.problems(run_of(series=seen(running, waiting)))
    assert bool(found) == invalid
    if invalid:
        (said,) = found
        assert "the client never more than 4 in flight: somebody else sends to it" in said


def test_one_of_a_user_s_own_requests_may_be_several_to_the_server():
    series = seen([0, 8, 8, 8, 0])
    assert validity.problems(run_of(series=series))
    assert not validity.problems(run_of(series=series, prompt_path="requests_file"))


def test_what_failed_here_may_go_on_there():
    records = [answered(k) for k in range(16)]
    records[0] = replace(records[0], error=RequestError("idle_timeout", "x"))
    assert not validity.problems(run_of(records, series=seen([0, 5, 5, 5, 0])))
    (said,) = validity.problems(run_of(records, series=seen([0, 6, 6, 6, 0])))
    assert "the server had 6 requests at once" in said


def generated(tokens: float, records: list[RequestRecord] | None = None, **engine: float) -> Run:
    return run_of(records, engine={"server_generation_tokens": tokens, **engine})


def test_more_tokens_than_came_are_somebody_else_s():
    assert not validity.problems(generated(16 * TOKENS))
    assert not validity.problems(generated(16 * TOKENS - 40))  # counted when a request ends
    (said,) = validity.problems(generated(16 * TOKENS + 1))
    assert said == ("the server generated 257 tokens, 256 came here: somebody else sends to it")


def test_ends_failures_and_the_tail_of_a_warm_up_explain_tokens():
    ended = [answered(k, finish_reason="stop", ignore_eos=False) for k in range(16)]
    assert not validity.problems(generated(16 * TOKENS + 16, ended))
    assert validity.problems(generated(16 * TOKENS + 17, ended))
    error = RequestError("http_500", "x")
    events = answered(3).events[:5]
    failed = [answered(k) for k in range(16)]
    failed[3] = answered(3, error=error, events=events, completion_tokens=None)
    assert not validity.problems(generated(16 * TOKENS, failed))
    assert validity.problems(generated(16 * TOKENS + 6, failed))
    failed[3] = replace(failed[3], asked_tokens=None)
    assert not validity.problems(generated(1e6, failed))  # it could have gone on for ever
    assert not validity.problems(generated(16 * TOKENS + 4, warmup_failed=1.0))


def test_where_nobody_counts_there_is_no_contradiction():
    assert not validity.problems(run_of(engine={}))
    blind = [
        replace(one, completion_tokens=None, events=(TokenEvent(one.events[0].at_s, "x"),))
        for one in run_of().records
    ]
    found = validity.problems(generated(1e6, blind))
    assert not [said for said in found if "somebody else" in said]


@pytest.mark.parametrize(
    ("found", "intended", "invalid"),
    [
        (0.0, 0.0, False),
        (0.015, 0.0, False),
        (0.5, 0.5, False),
        (0.2, 0.5, False),  # a cache that is too small finds less
        (0.5, 0.0, True),
        (0.9, 0.5, True),
        (0.9, None, False),  # conversations: it may find answers too
    ],
)
def test_a_prefix_cache_finds_no_more_than_prompts_share(found, intended, invalid):
    run = run_of(engine={"server_prefix_hit_rate": found})
    assert bool(validity.problems(run, None, intended)) == invalid


def test_a_template_around_every_prompt_is_shared():
    records = [answered(k, prompt_tokens=48) for k in range(16)]
    run = run_of(records, prompt_path="chat", engine={"server_prefix_hit_rate": 1 / 3})
    assert metrics.tokens_added_each(run) == [16] * 16
    assert not validity.problems(run, None, 0.0)
    run = replace(run, engine={"server_prefix_hit_rate": 0.6})
    (said,) = validity.problems(run, None, 0.0)
    assert said == (
        "the server's prefix cache held 60.0% of the prompts' tokens; "
        "they share 0.0%: the rest it had seen before the Run"
    )


@pytest.mark.parametrize("reason", ["hw_slowdown", "hw_thermal", "sw_thermal", "power_brake"])
def test_a_gpu_that_was_slowed_down_makes_it_invalid_and_says_how_long(reason):
    (said,) = validity.problems(run_of(engine={f"gpu_{reason}_s": 1.5}))
    assert "the GPU was slowed down" in said
    assert "for 1.5 s of 4.0 s" in said


@pytest.mark.parametrize(
    "engine",
    [
        {"gpu_sw_power_cap_s": 4.0, "gpu_sync_boost_s": 4.0},
        {"server_preemptions": 9.0, "server_kv_usage_max": 1.0},
        {"gpu_foreign_processes": 0.0, "gpu_foreign_bytes": 0.0},
    ],
)
def test_what_is_only_shown_makes_nothing_invalid(engine):
    assert not validity.problems(run_of(engine=engine))


def test_foreign_work_on_the_gpu_makes_it_invalid():
    engine = {"gpu_foreign_processes": 1.0, "gpu_foreign_bytes": 3.0 * (1 << 30)}
    (said,) = validity.problems(run_of(engine=engine))
    assert said == "1 process that is not ours worked on the GPU, with 3.0 GiB of its memory"


def test_failed_requests_count_whatever_the_gpu_did():
    records = [answered(k) for k in range(16)]
    records[0] = replace(records[0], error=RequestError("http_500", "x"))
    assert not validity.problems(run_of(records, engine={"gpu_hw_thermal_s": 3.0}))


def test_energy_per_token_is_of_all_tokens_that_came():
    energy, memory = metrics.TABLE["energy_per_token"], metrics.TABLE["gpu_memory"]
    run = run_of(engine={"gpu_energy_j": 512.0, "gpu_memory_peak_bytes": 7.0})
    assert energy.of_run(run) == pytest.approx(2.0)
    assert memory.of_run(run) == 7.0
    for none in (run_of(), run_of([answered(0, events=(), completion_tokens=0)])):
        assert energy.of_run(none) is None
        assert memory.of_run(none) is None


def gpu_cells(factory, limits: tuple[Limit, ...], engine: dict[str, float]) -> dict[str, str]:
    """The verdicts of the cells that only a GPU has, of one of two engines."""
    made = factory.make_night(suite=factory.make_suite(limits=limits))
    runs = tuple(replace(run, engine={**run.engine, **engine}) for run in made.runs)
    cells = factory.judge(replace(made, runs=runs))
    mine = (cell for cell in cells if cell.case.name == "a-w32_16-c1")
    return {c.metric: c.verdict for c in mine if c.metric in ("energy_per_token", "gpu_memory")}


def test_what_only_a_gpu_has_is_a_cell_where_it_was_measured_or_a_gate_asks_for_it(factory):
    measured = {"gpu_energy_j": 100.0, "gpu_memory_peak_bytes": 5.0}
    limit = (Limit("energy_per_token", max=1000.0),)
    assert gpu_cells(factory, (), {}) == {}
    assert gpu_cells(factory, (), measured) == {"energy_per_token": "PASS", "gpu_memory": "PASS"}
    assert gpu_cells(factory, limit, {}) == {"energy_per_token": "MISSING"}
    tight = (Limit("energy_per_token", max=0.001),)
    assert gpu_cells(factory, tight, measured)["energy_per_token"] == "LIMIT"


def test_a_launch_lost_to_the_machine_is_dropped_like_an_invalid_run(factory):
    """One of eight: the rest is judged. All of them: INVALID, equality too."""
    made = factory.make_night(suite=factory.make_suite(launches=8))

    def lost(numbers: range) -> dict[str, set[str]]:
        why = {"failure_kind": "gpu_not_free", "failure": "GPU x still used 70.0 GiB after 60 s"}
        mine = [(r.instance, r.launch) for r in made.launches]
        gone = {("a", number) for number in numbers} & set(mine)
        night = replace(
            made,
            runs=tuple(r for r in made.runs if (r.case.instance, r.launch) not in gone),
            launches=tuple(
                replace(r, launch_s=None, info=None, first_output=(), **why)
                if (r.instance, r.launch) in gone
                else r
                for r in made.launches
            ),
        )
        found: dict[str, set[str]] = {}
        for cell in factory.judge(night):
            if cell.case.instance == "a" and "step" not in cell.metric:
                found.setdefault(cell.metric, set()).add(cell.verdict)
        return found

    few, all_ = lost(range(3, 4)), lost(range(1, 9))
    assert few["ttft_p90"] == {"PASS"}
    assert few["greedy_equality"] == {"PASS"}
    assert set.union(*all_.values()) == {"INVALID"}
