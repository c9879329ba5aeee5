"""The pytest plugin: options, parameters, order, fixtures and the end of the session.

It loads in every pytest run of its environment, so this module imports nothing but pytest; all
else is imported once a test asks for one of the fixtures here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from headway.night import LiveLaunch
    from headway.plugin.state import Cell, State

STATE: pytest.StashKey[State] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--headway-…`; `headway run` passes the same options on."""
    group = parser.getgroup("headway", "Headway: the speed and correctness of inference engines")
    add = group.addoption
    add("--headway-suite", metavar="SUITE", help="suite to run, by name or path (default: quick)")
    add("--headway-run", metavar="DIR", help="judge this night again; nothing is measured")
    add("--headway-engine", metavar="NAME", action="append", help="only this instance (repeatable)")
    add("--headway-level", metavar="LEVEL", action="append", help="only this level (repeatable)")
    add("--headway-device", default="auto", help="auto, cpu or cuda")
    add("--headway-set", metavar="KEY=VALUE", action="append", help="change a value of the suite")
    add("--headway-reports", metavar="DIR", default="reports", help="folder of the nights")
    add("--headway-baselines", metavar="DIR", default="baselines", help="folder of the baselines")
    add("--headway-fresh", action="store_true", help="do not carry on an unfinished night")
    add(
        "--headway-strict",
        action="store_true",
        help="what cannot be told although it should be by now fails",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare our markers."""
    config.addinivalue_line("markers", "headway: a test of a night, parametrized by its suite")
    if config.getoption("headway_suite") and getattr(config.option, "numprocesses", None):
        from headway.plugin.starting import XDIST

        raise pytest.UsageError(XDIST)
    config.addinivalue_line("markers", "metric(name): the metric whose cells a test asserts")
    if config.getoption("headway_suite") or config.getoption("headway_run"):
        _state(config)  # a wrong suite is said before anything is collected


def _state(config: pytest.Config) -> State:
    if STATE not in config.stash:
        from headway.plugin.state import State

        config.stash[STATE] = State.from_config(config)
    return config.stash[STATE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test of a night its launches, cells or instances."""
    if metafunc.definition.get_closest_marker("headway") is None:
        return
    from headway.plugin.items import parameters

    for name, values, ids in parameters(_state(metafunc.config), metafunc):
        # Module scope, so that tests of one launch share its engine, and the last one ends it.
        scope: Literal["module", "function"] = "module" if name == "engine" else "function"
        metafunc.parametrize(name, values, ids=ids, indirect=True, scope=scope)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put measuring first, in the night's order; then the reference; then the readers."""
    if STATE in config.stash:
        from headway.plugin.items import arrange

        arrange(config.stash[STATE], items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the night, or say in one sentence why it cannot be."""
    if STATE in session.config.stash and not session.config.option.collectonly:
        from headway.plugin.items import needed

        session.config.stash[STATE].begin(needed(session.config.stash[STATE], session.items))


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[LiveLaunch]:
    """One launch of one instance: started when first used, ended and reaped after its last test."""
    from headway.night import LiveLaunch

    live = LiveLaunch(_state(request.config).night_in_progress(), request.param)
    yield live
    live.stop()


@pytest.fixture
def step(request: pytest.FixtureRequest) -> tuple[str, int]:
    """(phase, batch) of one engine step."""
    value: tuple[str, int] = request.param
    return value


@pytest.fixture
def comparison(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Returns, when called, what the second look at a candidate took, as a sentence."""
    state, candidate = _state(request.config), request.param
    state.night_in_progress()
    return lambda: state.second_look(candidate)


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """One case × metric; `cell.check()` measures it if need be and asserts its verdict."""
    case, metric = request.param
    return _state(request.config).cell(case, metric, request.node)


@pytest.fixture
def complete(request: pytest.FixtureRequest) -> Callable[[], tuple[list[str], ...]]:
    """Returns, when called, what is missing of an instance, what the machine kept from it, and what
    there was no budget for."""
    state, instance = _state(request.config), request.param
    return lambda: state.missing(instance)


@pytest.fixture
def night_state(request: pytest.FixtureRequest) -> State:
    """The night in progress, with everything this session knows of it."""
    state = _state(request.config)
    state.night_in_progress()
    return state


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let a verdict be its message's first word; remember it for the exit status."""
    outcome = yield
    if STATE in item.config.stash:
        from headway.plugin.message import shown_plainly

        report = outcome.get_result()  # type: ignore[attr-defined]
        shown_plainly(report, call)
        item.config.stash[STATE].note(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(
    session: pytest.Session, exitstatus: int
) -> Generator[None, object, object]:
    """Write the reports; turn a night that only cannot tell into exit status 3.

    A disk that is full stops pytest's own files too: said in one line, it is no traceback.
    """
    if STATE in session.config.stash:
        session.exitstatus = session.config.stash[STATE].finish(int(exitstatus))
    try:
        return (yield)
    except OSError as error:
        if STATE not in session.config.stash:
            raise
        sys.stderr.write(f"{error.filename or 'a file'} cannot be written: {error.strerror}\n")
        session.exitstatus = session.exitstatus or 3
        return None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show the night's table."""
    if STATE in config.stash:
        terminalreporter.ensure_newline()
        terminalreporter.write(config.stash[STATE].summary(terminalreporter))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the device back."""
    if STATE in config.stash:
        config.stash[STATE].close()
