"""Checkout, editable install and wheel: the same names, the same files, the declared needs."""

import ast
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {
    "src/headway": "headway",
    "engines": "headway/engines",
    "perf_tests": "headway/perf_tests",
}
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "reports")
NAMES = """
import importlib.util, sys
import headway, headway.engines, headway.engines.contract, headway.engines.models
import headway.perf_tests
for name in ("engines", "perf_tests", "src"):
    assert importlib.util.find_spec(name) is None, name
for name in ("headway", "headway.engines", "headway.perf_tests"):
    print(sys.modules[name].__file__)
"""


def run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, so that a build leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree") / "headway"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """The wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, tree)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def bare(tmp_path):
    """The Python of an environment that has nothing, not even pip."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    return tmp_path / "venv" / "bin" / "python"


def files_of(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_holds_every_file(built, tree, folder):
    packed = set(zipfile.ZipFile(built).namelist())
    expected = {f"{FOLDERS[folder]}/{name}" for name in files_of(tree / folder)}
    assert expected
    missing = expected - packed
    assert not missing, f"[tool.setuptools] packages or package-data leave out {sorted(missing)}"


def test_the_wheel_holds_what_a_newcomer_needs(built):
    packed = zipfile.ZipFile(built).namelist()
    for start, end in [
        ("headway/engines/envs/", ".txt"),
        ("headway/engines/models/", ".safetensors"),
        ("headway/perf_tests/suites/", ".toml"),
        ("headway/perf_tests/", ".py"),
        ("headway/", "/py.typed"),
    ]:
        assert any(name.startswith(start) and name.endswith(end) for name in packed), (start, end)
    assert {name.split("/")[0].split("-")[0] for name in packed} == {"headway"}


def test_a_checkout_has_the_names(tree, bare, tmp_path):
    code = f"import runpy; runpy.run_path({str(tree / 'conftest.py')!r})\n{NAMES}"
    files = run(bare, "-I", "-c", code, cwd=tmp_path).split()
    assert [Path(file) for file in files] == [
        tree / "src" / "headway" / "__init__.py",
        tree / "engines" / "__init__.py",
        tree / "perf_tests" / "__init__.py",
    ]


def test_an_editable_install_has_the_names(tree, bare, tmp_path):
    # With our own setuptools, for the environment has none; --ignore-installed leaves ours alone.
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    prefix = bare.parent.parent
    run(sys.executable, "-m", "pip", "install", *offline, "--prefix", prefix, "--editable", tree)
    files = run(bare, "-I", "-c", NAMES, cwd=tmp_path).split()
    assert [Path(file) for file in files] == [
        tree / "src" / "headway" / "__init__.py",
        tree / "engines" / "__init__.py",
        tree / "perf_tests" / "__init__.py",
    ]


def test_an_installed_wheel_has_the_names(built, bare, tmp_path):
    offline = ["--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", bare, "install", *offline, built)
    files = run(bare, "-I", "-c", NAMES, cwd=tmp_path).split()
    installed = Path(files[0]).parent
    assert installed.is_relative_to(bare.parent.parent)
    assert [Path(file).parent for file in files[1:]] == [
        installed / "engines",
        installed / "perf_tests",
    ]
    # A Python without Headway runs its modules through the wheel's own boot.py as well.
    table = run(
        sys._base_executable, "-I", installed / "engines" / "boot.py", "headway.environment"
    )
    assert "hf_naive" in table
    assert (bare.parent / "headway").is_file()


def test_the_plugin_is_registered_under_its_own_name():
    # Any other name, and naming the plugin in a conftest.py as well registers it twice.
    assert PROJECT["project"]["entry-points"]["pytest11"] == {"headway.plugin": "headway.plugin"}


def package_of(path: Path) -> str:
    """The import name of the folder that a file of the tree is in."""
    folder = next(folder for folder in FOLDERS if path.is_relative_to(ROOT / folder))
    parts = path.parent.relative_to(ROOT / folder).parts
    return ".".join([*FOLDERS[folder].split("/"), *parts])


def test_the_packages_are_those_of_the_tree():
    inits = [init for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == {package_of(init) for init in inits}


def test_every_folder_of_code_is_a_package():
    code = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [str(folder) for folder in code if not (folder / "__init__.py").is_file()] == []


def test_dependencies_are_what_is_imported():
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    others = imported - set(sys.stdlib_module_names)
    others = {name.lstrip("_") for name in others} - {"headway"}  # _pytest is pytest's
    names = {"pynvml": "nvidia-ml-py", "prometheus_client": "prometheus-client"}
    others = {names.get(name, name) for name in others}
    declared = {line.partition(">=")[0] for line in PROJECT["project"]["dependencies"]}
    # The experiments use its fixture, which needs no import.
    assert others | {"pytest-benchmark"} == declared
