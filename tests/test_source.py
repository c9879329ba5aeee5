"""Engines of other commits: real repositories, real checkouts, real launches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest

from headway import environment, source
from headway.engines import launch
from headway.engines.fake import MODEL, fake_tokens
from headway.engines.launch import LaunchError, LaunchSpec, launched
from headway.source import Source, SourceError
from headway.suite import Instance

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [11, 12, 13]
ECHO = resources.files("headway.workspace").joinpath("my_engines", "echo.py").read_text("utf-8")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the person's git configuration, and a name to commit with."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "x")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "x@example.org")


class Repository:
    """A repository in a folder, written to by git itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, **texts: str) -> None:
        """Write files; `__` in a name is a slash and `_py` at its end is `.py`."""
        for name, text in texts.items():
            path = self.folder / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def commit(self, **texts: str) -> str:
        self.write(**texts)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "mine")
    made.commit(engine_py="V = 1\n", sub__part_py="V = 1\n", gone="once\n")
    made.git("rm", "-q", "gone")
    made.commit(engine_py="V = 2\n", sub__part_py="V = 2\n", later__new_py="V = 2\n")
    return made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def refused(spec: str, home: Path, cwd: Path) -> str:
    with pytest.raises(SourceError) as caught:
        source.resolve(spec, home, cwd)
    message = str(caught.value)
    assert "\n" not in message
    assert not list((home / "trees").glob("*"))
    return message


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, git's own too: when it was written, and what it holds."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def folders(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir()}


# Naming a commit.


@pytest.mark.parametrize(
    ("rev", "means"),
    [
        ("HEAD", "HEAD"),
        ("HEAD~1", "HEAD~1"),
        ("main", "HEAD"),
        ("main^", "HEAD~1"),
        ("v1", "HEAD~1"),  # an annotated tag is not a commit, but names one
        ("refs/tags/v1", "HEAD~1"),
        ("@{0}", "HEAD"),
        ("HEAD^{/second}", "HEAD"),
    ],
)
def test_what_rev_parse_knows(rev: str, means: str, repository: Repository, home: Path) -> None:
    repository.git("tag", "-a", "v1", "-m", "x", "HEAD~1")
    repository.git("commit", "-q", "--amend", "-m", "second")
    found = source.resolve(f"git:{rev}", home, repository.folder)
    assert found.commit == repository.git("rev-parse", means)
    assert found.tree == home / "trees" / found.commit[:12]
    assert found.cwd == found.tree
    assert found.boot == launch.HERE / "boot.py"
    assert not found.own


def test_a_short_hash(repository: Repository, home: Path) -> None:
    commit = repository.git("rev-parse", "HEAD~1")
    assert source.resolve(f"git:{commit[:8]}", home, repository.folder).commit == commit


def test_no_repository(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    message = refused("git:HEAD", home, tmp_path)
    assert message == f"{tmp_path} is not in a git repository, so there is no commit to build from"


def test_gits_own_folder_has_no_subfolder_to_go_to(repository: Repository, home: Path) -> None:
    assert "is in no work tree" in refused("git:HEAD", home, repository.folder / ".git")


def test_no_git(repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    assert "no git on the PATH" in refused("git:HEAD", home, repository.folder)


@pytest.mark.parametrize(
    "rev", ["nonsense", "HEAD~9", "0" * 40, "main..HEAD", "^HEAD", "HEAD:engine.py", "a b", "é"]
)
def test_an_unknown_revision(rev: str, repository: Repository, home: Path) -> None:
    assert refused(f"git:{rev}", home, repository.folder) == f"git knows no commit {rev} here"


@pytest.mark.parametrize(
    "spec",
    [
        "HEAD",
        "git:",
        "git: ",
        "git:-",
        "git:--all",
        "git:--upload-pack=touch x",
        "git:a\nb",
        "svn:1",
    ],
)
def test_what_is_no_revision_is_not_given_to_git(
    spec: str, repository: Repository, home: Path
) -> None:
    assert refused(spec, home, repository.folder) == f"{spec!r} names no commit; it must be git:REV"
    assert not (repository.folder / "x").exists()


def test_a_branch_and_a_tag_of_one_name(repository: Repository, home: Path) -> None:
    repository.git("tag", "main", "HEAD~1")
    repository.git("config", "core.warnAmbiguousRefs", "false")
    for rev in ("main", "main~1"):
        message = refused(f"git:{rev}", home, repository.folder)
        assert message == f"{rev} is ambiguous: say refs/heads/main or refs/tags/main"
    found = source.resolve("git:refs/tags/main", home, repository.folder)
    assert found.commit == repository.git("rev-parse", "HEAD~1")


def test_digits_that_begin_two_commits(repository: Repository, home: Path) -> None:
    seen: dict[str, str] = {}
    tree = repository.git("rev-parse", "HEAD^{tree}")
    for number in range(2000):
        commit = repository.git("commit-tree", tree, "-m", f"{number}")
        if commit[:4] in seen:
            break
        seen[commit[:4]] = commit
    message = refused(f"git:{commit[:4]}", home, repository.folder)
    assert message.startswith(f"{commit[:4]} is ambiguous: more than one commit")


def test_a_branch_that_only_the_remote_has(
    repository: Repository, home: Path, tmp_path: Path
) -> None:
    repository.git("branch", "topic")
    repository.git("clone", "-q", str(repository.folder), str(tmp_path / "clone"))
    message = refused("git:topic", home, tmp_path / "clone")
    assert message == "git knows no commit topic here, but origin/topic"


def test_a_shallow_clone(repository: Repository, home: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    old = repository.git("rev-parse", "HEAD~1")
    repository.git("clone", "-q", "--depth", "1", f"file://{repository.folder}", str(clone))
    for rev in ("HEAD~1", old, old[:8]):
        message = refused(f"git:{rev}", home, clone)
        assert "the clone is shallow: git fetch --unshallow" in message
    assert source.resolve("git:HEAD", home, clone).commit == repository.git("rev-parse", "HEAD")
    subprocess.run(["git", "fetch", "-q", "--unshallow"], cwd=clone, check=True)
    assert source.resolve("git:HEAD~1", home, clone).commit == old


def test_the_repository_is_the_current_directorys_even_in_a_hook(
    repository: Repository, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Repository(tmp_path / "other")
    commit = other.commit(engine_py="V = 9\n")
    monkeypatch.setenv("GIT_DIR", str(repository.folder / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository.folder / ".git" / "index"))
    before = snapshot(repository.folder)
    assert source.resolve("git:HEAD", home, other.folder).commit == commit
    assert snapshot(repository.folder) == before


# The tree.


def test_the_tree_holds_the_commit_and_nothing_else(repository: Repository, home: Path) -> None:
    repository.write(engine_py="V = 'not committed'\n", new="untracked\n")
    tree = source.resolve("git:HEAD~1", home, repository.folder).tree
    held = {name: text for name, (_, text) in snapshot(tree).items()}
    assert held == {"engine.py": b"V = 1\n", "sub/part.py": b"V = 1\n", "gone": b"once\n"}
    assert [path.name for path in (home / "trees").iterdir()] == [tree.name]


def test_nothing_of_the_users_is_touched(repository: Repository, home: Path) -> None:
    """Changes in the stash, staged, unstaged and untracked; hooks that would run are planted."""
    repository.write(engine_py="V = 'stashed'\n")
    repository.git("stash")
    repository.write(sub__part_py="V = 'staged'\n")
    repository.git("add", "-A")
    repository.write(engine_py="V = 'unstaged'\n", new="untracked\n")
    repository.git("config", "core.splitIndex", "true")
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        path = repository.folder / ".git" / "hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {repository.folder}/ran\n")
        path.chmod(0o755)
    before, branches = snapshot(repository.folder), folders(repository.folder)
    for _ in range(2):
        tree = source.resolve("git:HEAD~1", home, repository.folder).tree
        (tree / "engine.py").write_text("changed\n")
    assert snapshot(repository.folder) == before
    assert folders(repository.folder) == branches
    assert repository.git("worktree", "list").count("\n") == 0


def test_attributes_for_archives_do_not_change_what_is_measured(
    repository: Repository, home: Path
) -> None:
    repository.write(version="$Format:%H$\n", kernel="fast\n")
    (repository.folder / ".gitattributes").write_text(
        "kernel export-ignore\nversion export-subst\n"
    )
    repository.commit()
    tree = source.resolve("git:HEAD", home, repository.folder).tree
    assert (tree / "kernel").read_text() == "fast\n"
    assert (tree / "version").read_text() == "$Format:%H$\n"


def test_a_sparse_checkout_does_not_make_the_tree_sparse(
    repository: Repository, home: Path
) -> None:
    repository.git("sparse-checkout", "set", "later")
    assert not (repository.folder / "sub").exists()
    tree = source.resolve("git:HEAD~1", home, repository.folder).tree
    assert (tree / "sub" / "part.py").exists()


def test_a_replaced_commit_is_still_itself(repository: Repository, home: Path) -> None:
    repository.git("replace", "HEAD~1", "HEAD")
    tree = source.resolve("git:HEAD~1", home, repository.folder).tree
    assert (tree / "engine.py").read_text() == "V = 1\n"


def test_a_linked_worktree_and_a_subfolder(
    repository: Repository, home: Path, tmp_path: Path
) -> None:
    repository.git("worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    found = source.resolve("git:HEAD~1", home, tmp_path / "linked" / "sub")
    assert found.cwd == found.tree / "sub"
    message = f"commit {found.commit[:12]} has no folder later"
    with pytest.raises(SourceError, match=message):
        source.resolve("git:HEAD~1", home, repository.folder / "later")


def test_a_tree_is_made_once(repository: Repository, home: Path) -> None:
    found = source.resolve("git:HEAD~1", home, repository.folder)
    before = snapshot(found.tree)
    assert source.resolve("git:HEAD~1", home, repository.folder) == found
    assert snapshot(found.tree) == before  # the times too: Python knows its caches by them


def test_caches_in_a_tree_stay_and_files_are_the_commits_again(
    repository: Repository, home: Path
) -> None:
    repository.commit(tuned="slow\n", quoted__é="x\n")
    tree = source.resolve("git:HEAD", home, repository.folder).tree
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "engine.pyc").write_bytes(b"whatever")
    (tree / "tuned").write_text("fast\n")  # a cache that is committed, rewritten by a run
    (tree / "engine.py").unlink()
    (tree / "quoted" / "é").write_text("y\n")
    untouched = (tree / "sub" / "part.py").stat()
    assert source.resolve("git:HEAD", home, repository.folder).tree == tree
    assert (tree / "tuned").read_text() == "slow\n"
    assert (tree / "engine.py").read_text() == "V = 2\n"
    assert (tree / "quoted" / "é").read_text() == "x\n"
    assert (tree / "__pycache__" / "engine.pyc").read_bytes() == b"whatever"
    assert (tree / "sub" / "part.py").stat().st_mtime_ns == untouched.st_mtime_ns


def test_what_is_not_fetched_is_said_once(repository: Repository, home: Path) -> None:
    (repository.folder / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (repository.folder / "weights.bin").write_text("version https://git-lfs\n")
    repository.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", "./", "module")
    repository.commit()
    # As if a server had been asked for what the pointers stand for; it need not be installed.
    repository.git("config", "filter.lfs.smudge", "echo fetched")
    repository.git("config", "filter.lfs.required", "true")
    said: list[str] = []
    instances = [
        Instance(name, "engine:E", "fake", "float32", source=f"git:{rev}")
        for name, rev in (("a", "HEAD"), ("b", "main"), ("c", "HEAD~1"))
    ]
    sources = source.resolve_all("s.toml", instances, home, repository.folder, said.append)
    tree = sources["a"].tree
    assert list((tree / "module").iterdir()) == []
    assert (tree / "weights.bin").read_text() == "version https://git-lfs\n"
    assert len(said) == 2
    assert f"submodules are not fetched; their folders in {tree} are empty" in said[0]
    assert f"in {tree} they are pointers" in said[1]


def test_a_home_that_cannot_be_written(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="HEADWAY_HOME names another place"):
        source.resolve("git:HEAD", tmp_path / "file", repository.folder)


def test_a_commit_whose_files_are_missing_leaves_no_tree(
    repository: Repository, home: Path
) -> None:
    blob = repository.git("rev-parse", "HEAD:engine.py")
    (repository.folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    message = refused("git:HEAD", home, repository.folder)
    assert message.startswith("git cannot check out ")
    assert blob in message


RESOLVE = """
import sys, time
from pathlib import Path
from headway import source
home, cwd, start = sys.argv[1:]
while time.time() < float(start):
    pass
print(source.resolve("git:HEAD", Path(home), Path(cwd)).tree)
"""


def test_two_processes_at_once(repository: Repository, home: Path) -> None:
    for number in range(300):
        repository.write(**{f"many__m{number}_py": f"V = {number}\n"})
    repository.commit()
    start = time.time() + 3
    command = [sys.executable, "-c", RESOLVE, str(home), str(repository.folder), str(start)]
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda _: subprocess.check_output(command, text=True), range(3)))
    tree = Path(said[0].strip())
    assert len(set(said)) == 1
    assert [path.name for path in (home / "trees").iterdir()] == [tree.name]
    assert len(list((tree / "many").iterdir())) == 300


def test_one_that_comes_second_leaves_the_first_ones_tree(
    repository: Repository, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = source.resolve("git:HEAD", home, repository.folder)
    (first.tree / "cache").write_text("the first one's\n")
    # As seen by one that looked before it was there.
    monkeypatch.setattr(source, "_restore", lambda *given: source._make(*given))
    assert source.resolve("git:HEAD", home, repository.folder) == first
    assert (first.tree / "cache").exists()
    assert [path.name for path in (home / "trees").iterdir()] == [first.tree.name]


# Kinds, and the Python they run in.


def instance(kind: str, rev: str = "HEAD", name: str = "old") -> Instance:
    return Instance(name, kind, "fake", "float32", source=f"git:{rev}")


def not_built(kind: str, home: Path, cwd: Path, rev: str = "HEAD") -> str:
    with pytest.raises(SourceError) as caught:
        source.resolve_all("s.toml", [instance(kind, rev)], home, cwd, lambda _: None)
    assert str(caught.value).startswith(f"s.toml: engine.old.source is 'git:{rev}': ")
    return str(caught.value)


ENVIRONMENTS = """
[headway]
engines = ["fake"]
own = true
[hf]
engines = ["hf_static", "reference"]
"""
# Prints where it was started, as a stand-in for what makes an environment.
BOOT = """
import os, pathlib, sys
home = pathlib.Path(os.environ["HEADWAY_HOME"])
sys.stderr.write("will download about 3 MB\\n")
if (home / "broken").exists():
    sys.exit("pip ended with 1")
python = home / "envs" / "python"
python.parent.mkdir(exist_ok=True)
python.write_text(" ".join([os.getcwd(), *sys.argv]))
print(python)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Repository:
    """What looks like a checkout of Headway."""
    made = Repository(tmp_path / "headway")
    made.write(engines__boot_py=BOOT, src__headway__core_py="", sub__deep__x="")
    made.write(engines__envs__environments="")
    (made.folder / "engines" / "envs" / "environments.toml").write_text(ENVIRONMENTS)
    made.commit(my_py="")
    return made


def test_instances_without_a_source_need_no_repository(tmp_path: Path, home: Path) -> None:
    plain = Instance("a", "fake", "fake", "float32")
    assert source.resolve_all("s.toml", [plain], home, tmp_path, lambda _: None) == {}
    assert not home.exists()


@pytest.mark.parametrize("kind", ["vllm", "hf_static", "fake"])
def test_a_users_repository_builds_engines_of_their_own_only(
    kind: str, repository: Repository, home: Path
) -> None:
    message = not_built(kind, home, repository.folder)
    assert f"kind {kind!r} is not built from this repository" in message
    assert "python = or image =" in message


def test_a_third_partys_engine_is_not_built_from_a_commit_of_headway(
    checkout: Repository, home: Path
) -> None:
    assert "no engine 'vllm', only fake, hf_static, ref" in not_built("vllm", home, checkout.folder)
    message = not_built("vllm_serve", home, checkout.folder)
    assert message.endswith(
        "kind 'vllm_serve' is not built from a commit; "
        "another version of it is given by python = or image ="
    )


@pytest.mark.parametrize("kind", ["later.new:E", "nothing:E", "my_namespace.x:E", "installed.x:E"])
def test_a_module_that_the_commit_lacks_is_not_taken_from_elsewhere(
    kind: str, repository: Repository, home: Path
) -> None:
    """A package that is installed from the working tree would be found, and measured, instead."""
    repository.write(installed____init___py="", installed__x_py="")
    module = kind.partition(":")[0]
    assert f"has no module {module} that" in not_built(kind, home, repository.folder, "HEAD~1")
    if kind.startswith("my_namespace"):
        repository.commit(my_namespace__x_py="")
        assert "an __init__.py" in not_built(kind, home, repository.folder)


def test_kinds_and_pythons_of_a_checkout_of_headway(checkout: Repository, home: Path) -> None:
    kinds = ("fake", "hf_static", "my:E")
    instances = [instance(kind, name=f"i{n}") for n, kind in enumerate(kinds)]
    below = checkout.folder / "sub" / "deep"
    sources = source.resolve_all("s.toml", instances[:2], home, below, lambda _: None)
    sources |= source.resolve_all("s.toml", instances[2:], home, checkout.folder, lambda _: None)
    said: list[str] = []
    found = [
        source.python_for(sources[each.name], each.kind, home, said.append) for each in instances
    ]
    tree = sources["i0"].tree
    assert {each.boot for each in sources.values()} == {tree / "engines" / "boot.py"}
    assert [each.cwd for each in sources.values()] == [tree / "sub/deep", tree / "sub/deep", tree]
    assert found == [Path(sys.executable), home / "envs" / "python", Path(sys.executable)]
    asked = f"{tree} {tree}/engines/boot.py headway.environment make hf"
    assert found[1].read_text() == asked
    assert said == ["will download about 3 MB\n"]


def test_headways_own_engines_are_found_from_a_folder_that_the_commit_lacks(
    checkout: Repository, home: Path
) -> None:
    checkout.write(scratch__x="")
    found = source.resolve("git:HEAD", home, checkout.folder / "scratch")
    assert found.cwd == found.tree


def test_an_environment_that_was_not_made(checkout: Repository, home: Path) -> None:
    found = source.resolve("git:HEAD", home, checkout.folder)
    (home / "broken").write_text("")
    with pytest.raises(SourceError) as caught:
        source.python_for(found, "hf_static", home, lambda _: None)
    what = f"the environment hf of commit {found.short} was not made"
    assert str(caught.value) == f"{what}: pip ended with 1"


@pytest.mark.parametrize("text", [None, "[hf\n"])
def test_a_checkout_too_old_to_name_its_environments(
    text: str | None, checkout: Repository, home: Path
) -> None:
    path = checkout.folder / "engines" / "envs" / "environments.toml"
    path.unlink()
    if text is not None:
        path.write_text(text)
    checkout.commit()
    assert "says no environments in" in not_built("fake", home, checkout.folder)


# Launches.


def spec(tmp_path: Path, found: Source, kind: str, **changes: object) -> LaunchSpec:
    fields: dict[str, object] = {
        "instance": "old",
        "kind": kind,
        "model": MODEL,
        "dtype": "float32",
        "device": "cpu",
        "python": source.python_for(found, kind, tmp_path / "home", lambda _: None),
        "log": tmp_path / "engine.log",
        "start_timeout_s": 60.0,
        "boot": found.boot,
        "cwd": found.cwd,
    }
    return LaunchSpec(**(fields | changes))  # type: ignore[arg-type]


def answer_of(endpoint: launch.Endpoint) -> list[int]:
    body = {"model": MODEL["name"], "prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    ids: list[int] = endpoint.post("/v1/completions", body)["choices"][0]["token_ids"]
    return ids


def command_lines(endpoint: launch.Endpoint) -> list[list[str]]:
    return [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in endpoint.pids()]


def test_an_engine_of_ones_own_at_two_commits(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers otherwise and calls itself otherwise at each, and at none as in the working tree,
    from whose subfolder it is started."""
    mine = Repository(tmp_path / "mine")
    wrong = ECHO.replace('version="1"', 'version="2"').replace("wrong: bool = False", "wrong=True")
    wrong = wrong.replace("wrong=True", "wrong: bool = True")
    mine.commit(bench__my_engines____init___py="", bench__my_engines__echo_py=ECHO)
    mine.commit(bench__my_engines__echo_py=wrong)
    mine.write(bench__my_engines__echo_py="raise SystemExit('the working tree')\n")
    monkeypatch.chdir(mine.folder / "bench")
    monkeypatch.setenv("PYTHONPATH", str(mine.folder / "bench"))  # as where it is installed
    right = list(fake_tokens(tuple(PROMPT), 4))
    for rev, version, first_ones in (("HEAD~1", "1", right), ("HEAD", "2", None)):
        found = source.resolve(f"git:{rev}", home, Path.cwd())
        with launched(spec(tmp_path, found, "my_engines.echo:Echo")) as endpoint:
            assert endpoint.info().version == version
            answered = answer_of(endpoint)
            assert (answered == right) == (first_ones is not None)
            assert answered[0] == right[0]
    here = spec(tmp_path, found, "my_engines.echo:Echo", boot=launch.HERE / "boot.py", cwd=None)
    with pytest.raises(LaunchError, match="the working tree"), launched(here):
        pass


def test_a_python_named_from_here_is_found_from_there(
    repository: Repository, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found = source.resolve("git:HEAD", home, repository.folder)
    for python in (Path("bin/python"), Path("python")):
        with launched(spec(tmp_path, found, "fake", python=python)) as endpoint:
            assert endpoint.info().kind == "fake"


def this_repository() -> Path:
    asked = ["git", "rev-parse", "--show-toplevel"]
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or Path(done.stdout.strip()) != ROOT:
        pytest.skip("this is no git checkout of Headway")
    return ROOT


def test_the_fake_engine_of_this_repositorys_last_commit(tmp_path: Path, home: Path) -> None:
    root = this_repository()
    before = subprocess.check_output(["git", "status", "--porcelain"], cwd=root)
    sources = source.resolve_all("s.toml", [instance("fake")], home, root / "tests", lambda _: None)
    found = sources["old"]
    assert found.own
    args = {"ttft_s": 0.001, "itl_s": 0.001}
    with launched(spec(tmp_path, found, "fake", args=args)) as endpoint:
        assert endpoint.info().kind == "fake"
        assert answer_of(endpoint) == list(fake_tokens(tuple(PROMPT), 4))
        hosts = [line for line in command_lines(endpoint) if "headway.engines.host" in line]
        assert [line[1] for line in hosts] == [str(found.tree / "engines" / "boot.py")]
    assert subprocess.check_output(["git", "status", "--porcelain"], cwd=root) == before


def test_the_environment_of_this_repositorys_last_commit(home: Path) -> None:
    """The tree's lock is this one's: the tree finds the environment that is made already."""
    root = this_repository()
    made = environment.plan(environment.environment_of("hf_static"), environment.default_home())
    if not made.made:
        pytest.skip("the environment hf is not made here")
    found = source.resolve("git:HEAD", home, root)
    locks = [folder / "engines" / "envs" / "hf.txt" for folder in (root, found.tree)]
    if locks[0].read_bytes() != locks[1].read_bytes():
        pytest.skip("the lock of hf differs from the last commit's")
    python = source.python_for(found, "hf_static", environment.default_home(), lambda _: None)
    assert python == made.python
