from __future__ import annotations

import gc
import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Fixtures that start engines and measure them.
MEASURING = frozenset(("workspace", "begin"))
# Where those are fake ones, and no test draws a narrow line between them (one that does: `alone`)
# or expects that no Run is replaced.
PACED = frozenset(
    f"test_{name}.py"
    for name in ("frozen", "optional", "out_of_memory", "plugin", "proofs", "upkeep", "versus")
)


def _load(name: str) -> ModuleType:
    """Import a module beside the tests: in importlib mode, tests cannot import their siblings."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def pytest_configure() -> None:
    """Hear interrupts: a shell's background job ignores them, and so would all that is run here."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what measures engines: run beside other tests, it would measure those as well.

    Long tests come first, so that no process of several is left with one when the others are done.
    """
    for item in items:
        if not MEASURING.isdisjoint(getattr(item, "fixturenames", ())):
            paced = item.path.name in PACED and item.get_closest_marker("alone") is None
            item.add_marker(pytest.mark.paced if paced else pytest.mark.alone)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Let no later collection look at what lives to the end: the load generator collects often.

    Imported modules and three thousand items make each of its collections a tenth of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    """tests/results_factory.py: whole nights in closed form."""
    return _load("results_factory")


@pytest.fixture(scope="session")
def command() -> ModuleType:
    """tests/command.py: the shipped command, run on fake engines."""
    return _load("command")


@pytest.fixture
def night_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Begin nights of suites without a model; what their labs keep running ends with the test."""
    from headway import night
    from headway.fingerprint import read_machine

    begun: list[Any] = []

    def make(
        loaded: Any,
        *,
        lab: Any = night.RealLab,
        device: str = "cpu",
        machine: Any = None,
        **changes: Any,
    ) -> Any:
        here, screen = Path(sys.executable), night.Screen()
        model = night.prepare("fake", here, tmp_path, lambda _: None)

        def make_lab(folder: Path) -> Any:
            starts = {i.name: night.Start(here) for i in loaded.instances}
            return lab(folder, loaded, device, {"fake": model}, starts, lambda _: here, screen)

        machine, facts = machine or read_machine("cpu"), {"fake": model.facts}
        reports = tmp_path / "reports"
        made = night.begin(loaded, machine, facts, reports, make_lab, screen=screen, **changes)
        begun.append(made)
        return made

    yield make
    for made in begun:
        made.lab.close()


@pytest.fixture
def workspace(unmeasured: Any) -> Any:
    """A folder with a small suite; whatever runs on its behalf afterwards is a failure."""
    return unmeasured


@pytest.fixture
def unmeasured(command: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """A workspace for commands that start no engine: they may run beside any test."""
    made = command.Workspace(tmp_path)
    made.write()
    yield made
    left = [] if command.nothing_left(tmp_path) else command.ours(tmp_path)
    for pid in left:
        command.kill(pid)
    assert not left, f"left running: {left}"
