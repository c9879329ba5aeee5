"""Environments are made from locks by the real pip, out of a folder of tiny wheels: no network."""

import hashlib
import io
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from headway import compiling, environment, installer, lockfile
from headway.environment import (
    EnvironmentFailed,
    NotHere,
    environment_of,
    main,
    plan,
    python_for,
)
from headway.lockfile import CpuBuilds, for_variant, read_lock, write_lock

ENVIRONMENTS = """
[mine]
about = "a test"
engines = ["mine_a", "mine_b"]
input = "mine.in"
[mine.cpu_builds]
index = "http://127.0.0.1:9/nothing-listens-here"
packages = ["tensors"]
leave_out = ["harmful"]

[here]
about = "this one"
engines = ["fake"]
input = "here.in"
own = true
"""
LOCK = """# mine: a test.
# download: 3 MB
# download linux_cuda: 40 MB

tensors==2.0  # 1.5 MB
tool==1.1

# [linux_cpu] Linux without an NVIDIA GPU has these as well
engine-cpu==4.0

# [linux_cuda] Linux with an NVIDIA GPU has these as well
gpu-things==3.0
"""


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write a wheel whose module says its version."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def envs(tmp_path, monkeypatch):
    """A folder of environments of our own, and a pip that sees only our wheels."""
    folder = tmp_path / "envs"
    (tmp_path / "wheels").mkdir()
    (tmp_path / "index").mkdir()
    folder.mkdir()
    (folder / "environments.toml").write_text(ENVIRONMENTS)
    (folder / "mine.txt").write_text(LOCK)
    for name, version in [("tool", "1.1"), ("gpu_things", "3.0"), ("engine_cpu", "4.0")]:
        wheel(tmp_path / "wheels", name, version)
    wheel(tmp_path / "wheels", "tensors", "2.0", "gpu-things")
    wheel(tmp_path / "wheels", "tensors", "2.0+cpu")
    monkeypatch.setattr(environment, "ENVS", folder)
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_INDEX_URL": (tmp_path / "index").as_uri(),
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_CACHE_DIR": "1",
        "HEADWAY_HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def seen(python: Path, module: str) -> str | None:
    """The version of `module` that `python` imports; None when it has none."""
    code = f"import {module}; print({module}.version)"
    result = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def refuse(*arguments, **options):
    pytest.fail(f"a process was started: {arguments}")


def test_made_on_demand_then_there_at_once(envs, home, monkeypatch):
    monkeypatch.setattr(environment, "variant_here", lambda: "linux_cpu")
    said: list[str] = []

    python = python_for("mine_b", home, said.append)

    # What and how much and where to, before pip is run; the index out of reach does no harm.
    assert "about 3 MB for mine (a test, linux_cpu)" in said[0]
    assert str(python.parent.parent) in said[0]
    assert seen(python, "tensors") == "2.0+cpu"
    assert seen(python, "tool") == "1.1"
    assert seen(python, "engine_cpu") == "4.0"
    assert seen(python, "gpu_things") is None

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert python_for("mine_a", home, refuse) == python
    assert main(["list"]) == 0


def test_a_gpu_takes_the_plain_build_and_its_own_pins(envs, home):
    planned = plan(environment.environments()["mine"], home, "linux_cuda")
    said: list[str] = []
    environment.make([planned], home, said.append)
    assert "about 40 MB" in said[0]
    assert seen(planned.python, "tensors") == "2.0"
    assert seen(planned.python, "gpu_things") == "3.0"
    assert seen(planned.python, "engine_cpu") is None


def test_two_at_once_make_one(envs, home, monkeypatch):
    monkeypatch.setattr(environment, "variant_here", lambda: "macos")
    said: list[str] = []
    pythons: list[Path] = []

    def ask():
        pythons.append(python_for("mine_a", home, said.append))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert pythons[0] == pythons[1]
    assert seen(pythons[0], "tool") == "1.1"
    assert sum(text.startswith("Made") for text in said) == 1
    assert sum(text.startswith("Waiting") for text in said) == 1


def test_failure_says_why_and_what_to_do_and_is_made_whole_later(envs, home, capsys):
    (envs / "mine.txt").write_text("tensors==2.0\nmissing==9\n")
    assert main(["make", "mine", "--variant", "macos"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "mine could not be made: pip ended with 1" in err
    assert "No matching distribution found for missing==9" in err
    assert "then do the same again" in err

    assert main(["list"]) == 0
    assert "unfinished" in capsys.readouterr().out

    # As if the missing one had been out of reach: the same folder, half-made, is made anew.
    (half,) = (home / "envs").glob("mine-*")
    (half / "rest of a broken run").touch()
    wheel(envs.parent / "wheels", "missing", "9")
    assert main(["make", "mine", "--variant", "macos"]) == 0
    assert capsys.readouterr().out.strip() == str(half / "bin" / "python")
    assert seen(half / "bin" / "python", "missing") == "9"
    assert not (half / "rest of a broken run").exists()

    assert main(["remove", "mine"]) == 0
    assert capsys.readouterr().out == "removed: 1\n"
    assert not half.exists()


def test_an_engine_of_this_python_needs_nothing(envs, home, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert python_for("fake", home, refuse) == Path(sys.executable)
    assert not home.exists()


def test_a_folder_of_someone_else_is_left_alone(tmp_path):
    folder = tmp_path / ".venv"
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(EnvironmentFailed, match="not made by Headway"):
        installer.build(folder, "key", Path(sys.executable), [], refuse)
    assert (folder / "precious").exists()


def test_a_home_that_cannot_be_written(envs, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "file"))
    assert main(["make", "mine"]) == 2
    assert "HEADWAY_HOME names another place" in capsys.readouterr().err


def test_what_a_folder_is_named_after(envs, home):
    mine = environment.environments()["mine"]
    first = plan(mine, home, "linux_cpu")
    assert plan(mine, home, "linux_cuda").folder != first.folder
    (envs / "mine.txt").write_text(LOCK.replace("a test", "other words").replace("1.5 MB", "9 MB"))
    assert plan(mine, home, "linux_cpu").folder == first.folder
    (envs / "mine.txt").write_text(LOCK.replace("tool==1.1", "tool==1.2"))
    assert plan(mine, home, "linux_cpu").folder != first.folder


def test_unknown_names_are_answered_with_the_known(envs, capsys):
    with pytest.raises(EnvironmentFailed, match=r"'vlllm'; there is one for: fake, mine_a, mine_b"):
        environment_of("vlllm")
    assert main(["make", "min"]) == 2
    assert "'min' to use here; there is: mine." in capsys.readouterr().err


def test_another_python_is_looked_for_on_the_path(envs, home, tmp_path, monkeypatch):
    toml = envs / "environments.toml"
    toml.write_text(ENVIRONMENTS.replace("[mine.cpu", 'pythons = ["2.6", "2.5"]\n[mine.cpu'))
    monkeypatch.setenv("PATH", str(tmp_path))
    mine = environment.environments()["mine"]
    with pytest.raises(EnvironmentFailed, match=r"needs Python 2\.6 or 2\.5: this is 3\."):
        plan(mine, home)
    (tmp_path / "python2.5").touch(mode=0o755)
    assert plan(mine, home).interpreter == tmp_path / "python2.5"


def test_what_this_machine_has_no_wheels_for_is_left_out_and_said(envs, home, capsys, monkeypatch):
    """Setting a checkout up goes on without it; asking for it fails."""
    toml = envs / "environments.toml"
    toml.write_text(ENVIRONMENTS.replace("[mine.cpu", 'machines = ["plan9_vax"]\n[mine.cpu'))
    made: list[str] = []
    monkeypatch.setattr(environment, "plan_checkout", lambda: "the checkout")
    monkeypatch.setattr(environment, "make", lambda plans, home, say: made.extend(plans))
    assert main(["setup", "mine"]) == 0
    assert made == ["the checkout"]
    assert "Left out: The environment mine has wheels for plan9_vax only" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert "not here" in capsys.readouterr().out
    with pytest.raises(NotHere, match=f"this is {sys.platform}_"):
        python_for("mine_a", home, refuse)
    assert main(["make", "mine"]) == 2


def test_reading_a_lock(envs):
    path = envs / "mine.txt"
    assert read_lock(path, "linux_cuda").pins == ("tensors==2.0", "tool==1.1", "gpu-things==3.0")
    assert read_lock(path, "linux_cpu").pins == ("tensors==2.0", "tool==1.1", "engine-cpu==4.0")
    assert read_lock(path, "linux_cuda").download_mb == 40
    assert read_lock(path, "macos").pins == ("tensors==2.0", "tool==1.1")
    assert read_lock(path, "macos").download_mb == 3


@pytest.mark.parametrize("line", ["tool>=1", "tool", "tool==1.*", "--index-url x", "tool==1 other"])
def test_a_lock_holds_pins_only(envs, line):
    (envs / "mine.txt").write_text(f"# a comment\n{line}\n")
    with pytest.raises(EnvironmentFailed, match=r"mine\.txt, line 2: .* should be NAME==VERSION"):
        read_lock(envs / "mine.txt", "linux_cpu")


def test_pins_with_a_cpu_build():
    pins, cpu = ["tool==1", "torch==2.0"], CpuBuilds(("torch",), "https://example.org")
    assert for_variant(pins, cpu, "linux_cpu") == ["tool==1", "torch==2.0+cpu"]
    assert for_variant(pins, cpu, "linux_cuda") == ["tool==1", "torch===2.0"]
    assert for_variant(pins, cpu, "macos") == pins
    with pytest.raises(EnvironmentFailed, match="torch has a CPU build and so must be pinned"):
        for_variant(["tool==1", "torch>=2"], cpu, "linux_cpu")


def test_writing_a_lock(envs, tmp_path):
    """One distribution has two names and two closures; what is left out takes nothing with it."""
    cpu = CpuBuilds(("tensors",), "http://127.0.0.1:9/nothing-listens-here", ("harmful",))
    wheels = tmp_path / "wheels"
    wheel(wheels, "harmful", "1.0")
    wheel(wheels, "tool", "1.3", "harmful")
    wheel(wheels, "engine", "5.0", "gpu-things")
    path = envs / "new.txt"
    both = ["tensors==2.0", "tool>=1  # why"]
    asked = {"linux_cpu": [*both, "engine-cpu==4.0"], "linux_cuda": [*both, "engine==5.0"]}
    write_lock(path, "a new one", asked, cpu, lambda text: None)
    assert path.read_text().startswith("# new: a new one.\n")
    assert read_lock(path, "macos").pins == ("tensors==2.0", "tool==1.3")
    assert read_lock(path, "linux_cpu").pins[2:] == ("engine-cpu==4.0",)
    assert read_lock(path, "linux_cuda").pins[2:] == (
        "engine==5.0",
        "gpu-things==3.0",
        "harmful==1.0",
    )
    assert read_lock(path, "linux_cuda").download_mb == 0


def test_without_cpu_builds_all_variants_are_one(envs):
    path = envs / "new.txt"
    asked = {"linux_cpu": ["tool==1.1"], "linux_cuda": ["never looked at==1"]}
    write_lock(path, "a new one", asked, CpuBuilds(), lambda text: None)
    assert read_lock(path, "macos").pins == read_lock(path, "linux_cuda").pins == ("tool==1.1",)


def test_requirements_of_one_variant(envs):
    (envs / "mine.in").write_text(
        "tool\n# [linux_cpu]\nengine-cpu==4  # a\n# [linux_cuda]\nengine==5\n"
    )
    mine = environment.environments()["mine"]
    assert environment.requirements(mine, "linux_cpu") == ["tool", "engine-cpu==4"]
    assert environment.requirements(mine, "linux_cuda") == ["tool", "engine==5"]


def of_cuda(pin: str) -> bool:
    """Whether a pin is of a library of CUDA's; what asks a driver how its GPUs are is none."""
    return pin.startswith(("nvidia", "cuda", "triton")) and not pin.startswith("nvidia-ml-py")


@pytest.mark.parametrize("name", environment.environments())
def test_the_committed_locks(name):
    chosen = environment.environments()[name]
    path = environment.ENVS / f"{name}.txt"
    cpu, cuda = read_lock(path, "linux_cpu"), read_lock(path, "linux_cuda")
    assert cpu.download_mb
    assert len(cpu.pins) == len(set(cpu.pins)) >= 5
    assert not list(filter(of_cuda, cpu.pins))
    assert (
        for_variant(cpu.pins, chosen.cpu, "linux_cpu") != list(cpu.pins) or not chosen.cpu.packages
    )
    assert bool(chosen.cpu.packages) == any(map(of_cuda, cuda.pins))
    assert not {pin.partition("==")[0] for pin in cpu.pins} & set(chosen.cpu.leave_out)
    assert (environment.ENVS / chosen.input).is_file()


def test_the_lock_is_of_what_is_asked_for():
    """Every direct requirement is pinned: no one changes an input and forgets the lock."""
    for name, chosen in environment.environments().items():
        for variant in lockfile.VARIANTS:
            pins = read_lock(environment.ENVS / f"{name}.txt", variant).pins
            locked = {pin.partition("==")[0] for pin in pins}
            for line in environment.requirements(chosen, variant):
                asked = lockfile.NAME.match(line)
                assert asked is not None, line
                assert asked[0].lower() in locked, f"`headway env lock {name}` was forgotten"


COMPILED = """
[greeter]
about = "compiled"
engines = ["greeter"]
input = "greeter.in"
[greeter.compiled]
source = "carrier==1.0"
sha256 = "{sha256}"
folder = "vendor/greeter"
configure = ["-DWORD=hello"]
target = "greet"
program = "out/greet"
download_mb = 2
minutes = 5
"""
# Does what CMake would: keeps its options for the build, and turns a source into a program.
CMAKE = """#!/bin/sh
if [ "$1" = --build ]; then
    echo "[49/100] Building greet.c"
    echo "[50/100] Building greet.c"
    test "$4" = greet || exit 3
    . "$2/source"
    if [ -e "$source/broken" ]; then echo "greet.c:1: error: planted"; exit 7; fi
    mkdir "$2/out"
    { echo "#!/bin/sh"; echo "echo $(cat "$2/options")"; } > "$2/out/greet"
    chmod +x "$2/out/greet"
else
    build=$4
    mkdir "$build"
    echo "source='$2'" > "$build/source"
    shift 6
    echo "$@" > "$build/options"
fi
"""
# pip asks every source archive who it is, by the archive's own build backend.
BACKEND = """
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "carrier-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: carrier\\nVersion: 1.0\\n")
    return info.name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def carrier(folder: Path, **more: str) -> str:
    """Write the source archive that carries the program, and return its SHA-256."""
    files = {"pyproject.toml": PYPROJECT, "backend.py": BACKEND, "vendor/greeter/greet.c": ""}
    path = folder / "carrier-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, **more}.items():
            member = tarfile.TarInfo(f"carrier-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def greeter(envs, tmp_path, monkeypatch):
    """Environments of which one is compiled: its folder, with a C++ compiler on the PATH."""
    wheels, tools = tmp_path / "wheels", tmp_path / "tools"
    wheel(wheels, "cmake", "1.0")
    with zipfile.ZipFile(wheels / "cmake-1.0-py3-none-any.whl", "a") as archive:
        script = zipfile.ZipInfo("cmake-1.0.data/scripts/cmake")
        script.external_attr = 0o100755 << 16
        archive.writestr(script, CMAKE)
    (envs / "environments.toml").write_text(COMPILED.format(sha256=carrier(wheels)))
    (envs / "greeter.txt").write_text("# download: 3 MB\ncmake==1.0\n")
    tools.mkdir()
    (tools / "c++").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.delenv("CXX", raising=False)
    return envs


def test_a_program_is_compiled_once_saying_first_what_it_takes(greeter, home, monkeypatch):
    said: list[str] = []
    python = python_for("greeter", home, said.append)

    assert "about 5 MB for greeter" in said[0]
    assert "greet is compiled here, once: about 5 minutes on two cores" in said[0]
    assert any("[50/100]" in text for text in said)
    assert not any("[49/100]" in text for text in said)
    greeting = subprocess.run([python.parent / "greet"], capture_output=True, text=True, check=True)
    assert "-DWORD=hello" in greeting.stdout
    assert f"-DCMAKE_MAKE_PROGRAM={python.parent / 'ninja'}" in greeting.stdout
    assert not (python.parents[1] / "compiling").exists()

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert python_for("greeter", home, refuse) == python


def test_what_a_compiled_environment_is_named_after(greeter, home, monkeypatch):
    first = plan(environment.environments()["greeter"], home).folder
    text = (greeter / "environments.toml").read_text()
    (greeter / "environments.toml").write_text(text.replace("hello", "bye"))
    assert plan(environment.environments()["greeter"], home).folder != first
    (greeter / "environments.toml").write_text(text)
    monkeypatch.setattr(environment, "processor", lambda: "another")
    assert plan(environment.environments()["greeter"], home).folder != first


@pytest.mark.parametrize(("asked", "named"), [(None, "c++, g++, clang++"), ("mine++", "mine++")])
def test_without_a_compiler_nothing_is_downloaded(
    greeter, home, tmp_path, monkeypatch, capsys, asked, named
):
    monkeypatch.setenv("PATH", str(tmp_path / "no tools"))
    if asked:
        monkeypatch.setenv("CXX", asked)
    assert main(["make", "greeter"]) == 2
    assert f"no C++ compiler ({named}) is on the PATH" in capsys.readouterr().err
    assert not (home / "envs").exists()


def test_other_sources_than_the_pinned_ones_are_not_compiled(greeter, home, tmp_path, capsys):
    carrier(tmp_path / "wheels", extra="planted")
    assert main(["make", "greeter"]) == 2
    assert "DO NOT MATCH THE HASHES" in capsys.readouterr().err
    assert not list(home.glob("envs/greeter-*/bin/greet"))


def test_what_does_not_compile_says_why_and_is_made_whole_later(greeter, home, tmp_path, capsys):
    toml = greeter / "environments.toml"
    broken = carrier(tmp_path / "wheels", **{"vendor/greeter/broken": ""})
    toml.write_text(COMPILED.format(sha256=broken))
    assert main(["make", "greeter"]) == 2
    err = capsys.readouterr().err
    assert "greeter could not be made: the compiler ended with 7" in err
    assert "greet.c:1: error: planted" in err
    (half,) = home.glob("envs/greeter-*")
    assert (half / "compiling").exists()

    # As if it had been cut short: what is there of it is made anew.
    toml.write_text(COMPILED.format(sha256=carrier(tmp_path / "wheels")))
    half.rename(plan(environment.environments()["greeter"], home).folder)
    assert main(["make", "greeter"]) == 0
    (made,) = home.glob("envs/greeter-*")
    assert (made / "bin" / "greet").exists()
    assert not (made / "compiling").exists()


def test_a_recipe_has_all_its_keys_and_no_others(greeter):
    text = (greeter / "environments.toml").read_text()
    for wrong, said in (
        (text.replace("minutes = 5", ""), "minutes of a compiled program is missing"),
        (text + "jobs = 2\n", "jobs of a compiled program is not known"),
    ):
        (greeter / "environments.toml").write_text(wrong)
        with pytest.raises(EnvironmentFailed, match=said):
            environment.environments()


def test_a_processor_is_known_by_what_it_can_do():
    assert compiling.processor() == compiling.processor()
    assert compiling.processor() or not Path("/proc/cpuinfo").exists()
