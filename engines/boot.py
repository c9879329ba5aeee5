"""Run a module of Headway with any Python, whatever is installed there.

    /path/to/env/bin/python boot.py headway.engines.host hf_naive --port 8000 …
    /path/to/env/bin/python boot.py pytest tests/hf

An engine lives in an environment of its own, in which Headway is not installed. This file, run by
its path, makes `headway` and `headway.engines` importable from where it lies itself, so that an
engine process always runs the same version as the instrument that started it. It is done at
module level: a process spawned by multiprocessing runs this file again, and finds the same.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

ENGINES = Path(__file__).resolve().parent
IN_WHEEL = (ENGINES.parent / "core.py").exists()
HEADWAY = ENGINES.parent if IN_WHEEL else ENGINES.parent / "src" / "headway"


def add_package(name: str, folder: Path) -> None:
    """Make `folder` importable as package `name`, without touching `sys.path`."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


for _name, _folder in (("headway", HEADWAY), ("headway.engines", ENGINES)):
    if _name not in sys.modules:
        add_package(_name, _folder)

# Run by its path, Python puts this folder first in sys.path, where `models` or `host` would shadow
# what an engine means by those names.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ENGINES]

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python boot.py MODULE [ARGUMENT ...]")
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
