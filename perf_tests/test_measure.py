"""Measuring: the only tests that start an engine. Each Run goes to the journal at once."""

import pytest

from headway.engines.launch import LaunchError
from headway.night import JournalError

pytestmark = pytest.mark.headway

STEP_LENGTH = 64
_timed = []


def engine_clock():
    """Seconds that the engine of the current test has spent in timed steps, by its own clock."""
    return _timed[-1].engine_clock()


def test_measure(engine):
    """An engine comes up, answers at every level, and is still alive afterwards."""
    try:
        engine.measure(engine.night.cases)
    except JournalError as error:
        pytest.fail(f"INVALID {engine.planned.name}: {error}", pytrace=False)
    if engine.out_of_budget:
        pytest.skip(f"INCONCLUSIVE {engine.planned.name}: budget: {engine.failure}")
    if engine.failure:
        word = "INVALID" if engine.lost_to_the_machine else "MISSING"
        pytest.fail(f"{word} {engine.planned.name}: {engine.failure}", pytrace=False)


def test_second_look(comparison):
    """More pairs of a candidate whose first ones look slower, and of a control; else nothing."""
    try:
        comparison()
    except JournalError as error:
        pytest.fail(f"INVALID {error}", pytrace=False)


@pytest.mark.benchmark(timer=engine_clock)
def test_step(engine, step, benchmark):
    """One prefill or decode step, without HTTP, scheduling or sampling around it."""
    if engine.failure:
        pytest.skip(f"{engine.planned.name} is not running: {engine.failure}")
    phase, batch = step
    most = engine.max_batch
    if most is not None and batch > most:
        pytest.skip(f"{engine.planned.name} runs at most {most} sequences in one step")
    if engine.has_steps(phase, batch):
        pytest.skip(f"{engine.planned.name} was timed before this night was interrupted")
    _timed[:] = [engine]
    try:
        benchmark.pedantic(engine.step, args=(phase, batch, STEP_LENGTH), rounds=5, warmup_rounds=1)
    except (LaunchError, OSError) as error:
        pytest.fail(f"MISSING {engine.planned.name} {phase}_step_b{batch}: {error}", pytrace=False)
    if benchmark.enabled:
        engine.add_steps(phase, batch, STEP_LENGTH, benchmark.stats.stats.data)
