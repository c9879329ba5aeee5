"""Gives a checkout that is not installed the import names and the plugin of an installed one.

Where Headway is installed its entry point has loaded the plugin; where `engines/boot.py` runs
pytest, in an engine's environment, there are the names and no plugin: there is nothing to do then.
"""

import importlib.util
import runpy
from pathlib import Path

if importlib.util.find_spec("headway") is None:
    ROOT = Path(__file__).parent
    boot = runpy.run_path(str(ROOT / "engines" / "boot.py"))
    boot["add_package"]("headway.perf_tests", ROOT / "perf_tests")
    pytest_plugins = ["headway.plugin"]

# These run in the environment of the engines they test; see the Makefile.
collect_ignore = ["tests/hf"] if importlib.util.find_spec("torch") is None else []
