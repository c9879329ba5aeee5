"""Who may import whom, what importing the plugin costs, and how long things may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTRUMENT = ROOT / "src" / "headway"

# A module imports only from the rows above its own. A package is one module here: its parts may
# import each other. `headway` itself holds the version and nothing else.
LAYERS = [
    {"headway", "core", "codec", "installer", "atomic", "console", "stamps", "timer"},
    {"lengths", "engines"},
    {"workload", "arrivals", "stats", "roofline", "fingerprint", "tables"},
    {"here", "compiling", "lockfile"},
    {"sse", "transport", "suite", "metrics", "perf_tests", "calibration", "mock_server"},
    {"loadgen", "validity", "prefix_cache", "telemetry"},
    {"results", "answers", "baseline", "source"},
    {"questions", "pairs", "history", "decisions"},
    {"correctness"},
    {"verdict", "night"},
    {"report", "anchor", "environment", "workspace"},
    {"outlook", "versus", "proposal", "available"},
    {"plugin", "upkeep"},
    {"baseline_cli"},
    {"cli"},
]
LAYER = {module: number for number, row in enumerate(LAYERS) for module in row}
ENGINE_LIBRARIES = {"torch", "transformers", "vllm", "safetensors", "tokenizers", "gguf"}
# What the instrument or an engine may use, but a pytest run that measures nothing must not load.
HEAVY = ["httptools", "hypothesis", "jsonschema", "numpy", "prometheus_client", "pynvml", "rich"]
HEAVY += ["scipy", "uvloop"]


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python files in {folders}"
    return found


def dotted(path: Path) -> str:
    """The import name of a source file, `headway.night.journal`."""
    folders = {
        INSTRUMENT: "headway",
        ROOT / "engines": "headway.engines",
        ROOT / "perf_tests": "headway.perf_tests",
    }
    base = next(folder for folder in folders if folder in path.parents)
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join([folders[base], *(part for part in parts if part != "__init__")])


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere: in functions and for type checking as well."""
    package = dotted(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # What is imported from a package may be a module of it.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The row entry that an imported name belongs to; None for what is not Headway's."""
    parts = name.split(".")
    if parts[0] != "headway":
        return None
    known = len(parts) > 1 and (
        (INSTRUMENT / parts[1]).is_dir()
        or (INSTRUMENT / f"{parts[1]}.py").is_file()
        or parts[1] in ("engines", "perf_tests")
    )
    return parts[1] if known else "headway"


def test_every_module_has_a_layer():
    modules = {module_of(dotted(path)) for path in sources("src/headway")}
    assert modules <= LAYER.keys(), f"give a layer to {sorted(modules - LAYER.keys())}"


@pytest.mark.parametrize("path", sources("src/headway"), ids=dotted)
def test_imports_only_from_lower_layers(path):
    own = module_of(dotted(path))
    for name in imports(path):
        other = module_of(name)
        if other is not None and other != own:
            assert other in LAYER, f"{dotted(path)} imports {name}"
            assert LAYER[other] < LAYER[own], f"{dotted(path)} imports {name}, of a layer not lower"


@pytest.mark.parametrize("path", sources("engines"), ids=dotted)
def test_engines_need_nothing_of_the_instrument_but_core(path):
    allowed = {None, "core", "engines", "headway"}
    wrong = [name for name in imports(path) if module_of(name) not in allowed]
    assert not wrong


@pytest.mark.parametrize("path", sources("src/headway"), ids=dotted)
def test_the_instrument_imports_no_engine_library(path):
    wrong = [name for name in imports(path) if name.split(".")[0] in ENGINE_LIBRARIES]
    assert not wrong


def test_importing_the_plugin_brings_in_nothing_heavy():
    names = [*HEAVY, *sorted(ENGINE_LIBRARIES), "asyncio"]
    code = (
        "import sys, pytest; before = set(sys.modules); import headway.plugin\n"
        f"print(*[n for n in {names} if n in sys.modules and n not in before])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_functions_and_files_are_short():
    long = []
    for path in sources("src", "engines", "perf_tests"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines, of 400")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 60:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines, of 60")
    assert not long


def broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in caught
    )


def test_there_is_one_broad_except():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("src", "engines")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and broad(node)
    ]
    assert len(found) <= 1, found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import headway.suite", ["headway.suite"]),
        ("from headway import stats", ["headway.stats"]),
        ("from . import stats", ["headway.stats"]),
        ("from .night.plan import order", ["headway.night.plan.order"]),
        ("def f():\n    import torch.nn", ["torch.nn"]),
        ("if TYPE_CHECKING:\n    from headway.cli import main", ["headway.cli.main"]),
    ],
)
def test_the_reader_of_imports(line, expected, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "INSTRUMENT", tmp_path)
    (tmp_path / "some.py").write_text(line)
    assert list(imports(tmp_path / "some.py")) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("except Exception:", True),
        ("except (ValueError, BaseException):", True),
        ("except:", True),
        ("except (ValueError, OSError) as error:", False),
    ],
)
def test_the_reader_of_excepts(line, expected):
    tree = ast.parse(f"try:\n    pass\n{line}\n    pass")
    assert [broad(n) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)] == [expected]
