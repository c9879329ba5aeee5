"""Owns the trees of other commits: naming a commit, checking it out below Headway's home, and what
an engine's process is started with from there.

    [engine.old]
    source = "git:REV"        REV as `git rev-parse` knows it in the current directory's repository

In a checkout of Headway the process is the tree's own: its engines, its host, the environment of
its lock files. In any other repository it is an engine `package.module:Class`, found in the same
folder of the tree as otherwise in the current directory, under the host of this Headway. Nothing
of the user's repository is written: no index, no branch, no stash, no worktree's registration.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.engines import launch
from headway.engines.servers import launcher_of
from headway.suite import Instance

PREFIX = "git:"
SHORT = 12
ASK_TIMEOUT_S = 60.0
# A checkout may fetch: a partial clone brings a commit's files in when they are asked for.
CHECKOUT_TIMEOUT_S = 1800.0
LFS = "filter=lfs"
GIT = (
    "git",
    *("-c", "core.hooksPath=/dev/null"),  # post-index-change runs for any index
    *("-c", "core.fsmonitor=false"),  # starts a daemon
    *("-c", "core.splitIndex=false"),  # writes into the repository
    *("-c", "core.sparseCheckout=false"),
    *("-c", "core.warnAmbiguousRefs=true"),
    # Large files stay pointers: what they point to is fetched from a server.
    *("-c", "filter.lfs.process=", "-c", "filter.lfs.smudge=", "-c", "filter.lfs.clean="),
    *("-c", "filter.lfs.required=false"),
)
# Set where a hook of git runs us; they would name its repository and its index.
INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
ELSEWHERE = "another version of it is given by python = or image ="

Say = Callable[[str], object]


class SourceError(ValueError):
    """An engine cannot be built from what `source` names; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Source:
    """A commit, where its files lie, and what starts an engine of it: a boot.py and a folder.

    `own` says that `boot` is the tree's own, of a checkout of Headway. `notes` are sentences on
    what the tree lacks.
    """

    commit: str
    tree: Path
    boot: Path
    cwd: Path
    own: bool = False
    notes: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The commit as people and treatments name it."""
        return self.commit[:SHORT]


@dataclass(frozen=True, slots=True)
class _Repository:
    """A user's repository: its git directory, and the current directory below its top."""

    git_dir: Path
    below: Path
    shallow: bool


def resolve(spec: str, home: Path, cwd: Path) -> Source:
    """Return the commit that `git:REV` names in the repository around `cwd`, checked out below
    `home`. Raises SourceError."""
    rev = _revision(spec)
    repository = _repository(cwd)
    commit = _commit(rev, repository, cwd)
    tree = home / "trees" / commit[:SHORT]
    if tree.is_dir():
        _restore(tree, commit, repository)
    else:
        _make(tree, commit, repository)
    own = (tree / "engines" / "boot.py").is_file() and (tree / "src" / "headway").is_dir()
    folder = tree / repository.below
    if not folder.is_dir():
        if not own:
            raise SourceError(f"commit {commit[:SHORT]} has no folder {repository.below}")
        folder = tree  # Headway's own engines are found from anywhere
    boot = tree / "engines" / "boot.py" if own else launch.HERE / "boot.py"
    return Source(commit, tree, boot, folder, own, _notes(tree))


def resolve_all(
    path: str, instances: Iterable[Instance], home: Path, cwd: Path, say: Say
) -> dict[str, Source]:
    """Return the source of each instance that names one, by the instance's name. Raises
    SourceError, which names the suite's `path` and the instance; what a tree lacks is said once."""
    sources: dict[str, Source] = {}
    for instance in instances:
        if instance.source is None:
            continue
        try:
            source = resolve(instance.source, home, cwd)
            _check_kind(source, instance.kind)
        except SourceError as error:
            where = f"engine.{instance.name}.source is {instance.source!r}"
            raise SourceError(f"{path}: {where}: {error}") from error
        if source not in sources.values():
            for note in source.notes:
                say(f"{instance.source}: {note}\n")
        sources[instance.name] = source
    return sources


def python_for(source: Source, kind: str, home: Path, say: Say) -> Path:
    """Return the Python in which an engine of this kind runs from a source; `say` is told what is
    downloaded for it. A tree of Headway makes its environment itself. Raises SourceError."""
    if not source.own or ":" in kind:
        return Path(sys.executable)
    name = _environment(source, kind)
    return Path(sys.executable) if name is None else _make_environment(source, name, home, say)


def _revision(spec: str) -> str:
    rev = spec.removeprefix(PREFIX)
    # No name of git's begins with a dash, which would be an option, or holds a control character.
    named = spec.startswith(PREFIX) and rev.strip() and rev.isprintable()
    if not named or rev.startswith("-"):
        raise SourceError(f"{spec!r} names no commit; it must be git:REV")
    return rev


def _repository(cwd: Path) -> _Repository:
    asked = ("--is-inside-work-tree", "--is-shallow-repository", "--absolute-git-dir")
    answer = _ask(cwd, "rev-parse", *asked, "--show-prefix")
    inside, shallow, git_dir, prefix = [*answer.stdout.split("\n"), "", "", ""][:4]
    if answer.returncode != 0 and "not a git repository" in answer.stderr:
        raise SourceError(f"{cwd} is not in a git repository, so there is no commit to build from")
    if answer.returncode != 0:
        raise SourceError(f"git cannot read the repository of {cwd}: {_last(answer)}")
    if inside != "true":
        raise SourceError(f"{cwd} is in no work tree of its git repository")
    return _Repository(Path(git_dir), Path(prefix), shallow == "true")


def _commit(rev: str, repository: _Repository, cwd: Path) -> str:
    answer = _ask(cwd, "rev-parse", "--verify", f"{rev}^{{commit}}")
    # Git only warns of a branch and a tag of one name, and takes the tag.
    if twice := re.search(r"refname '(.+)' is ambiguous", answer.stderr):
        names = _refs(cwd, *(f"refs/{kind}/{twice[1]}" for kind in ("heads", "tags")))
        raise SourceError(f"{rev} is ambiguous: say {' or '.join(names) or 'refs/…, all of it'}")
    if "is ambiguous" in answer.stderr and answer.returncode != 0:
        raise SourceError(f"{rev} is ambiguous: more than one commit begins so; say more digits")
    commit = answer.stdout.strip()
    if answer.returncode == 0 and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit):
        return commit
    if remote := _refs(cwd, f"refs/remotes/*/{rev}"):
        theirs = " and ".join(name.removeprefix("refs/remotes/") for name in remote)
        raise SourceError(f"git knows no commit {rev} here, but {theirs}")
    if repository.shallow:
        raise SourceError(
            f"{rev} is no commit that this clone has, and the clone is shallow: "
            "git fetch --unshallow brings all of them"
        )
    raise SourceError(f"git knows no commit {rev} here")


def _refs(cwd: Path, *patterns: str) -> list[str]:
    return _ask(cwd, "for-each-ref", "--format=%(refname)", *patterns).stdout.split()


def _make(tree: Path, commit: str, repository: _Repository) -> None:
    """Check a commit out beside its place, then rename: of two at once, one is first."""
    beside = tree.with_name(f".{tree.name}-{os.getpid()}-{os.urandom(3).hex()}")
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise SourceError(
            f"{tree.parent} cannot be written ({error.strerror}); HEADWAY_HOME names another place"
        ) from error
    try:
        with tempfile.TemporaryDirectory() as folder:
            # An index of its own and no `git worktree add`, which registers itself in the user's
            # repository, runs its hooks and must be pruned; and no `git archive`, which leaves out
            # and rewrites files as .gitattributes says (export-ignore, export-subst).
            index = Path(folder) / "index"
            _do(beside, repository, index, "read-tree", "--reset", "-u", commit)
        beside.rename(tree)
    except OSError as error:
        if not tree.is_dir():
            raise SourceError(f"{tree} cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _restore(tree: Path, commit: str, repository: _Repository) -> None:
    """Make the commit's files again what they were, by content; what else a run left there (caches)
    stays, and so do the times of unchanged files, by which Python knows its caches."""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        _do(tree, repository, index, "read-tree", commit)
        _do(tree, repository, index, "update-index", "-q", "--refresh", fails=True)
        asked = ("--name-only", "-z", "--ignore-submodules=all")
        changed = _do(tree, repository, index, "diff-files", *asked)
        if changed:
            _do(tree, repository, index, "checkout-index", "-f", "-z", "--stdin", given=changed)


def _do(
    tree: Path,
    repository: _Repository,
    index: Path,
    *arguments: str,
    given: str = "",
    fails: bool = False,
) -> str:
    """Run git on a tree with an index of its own; `fails`: a status that is not 0 means nothing."""
    places = (f"--git-dir={repository.git_dir}", f"--work-tree={tree}")
    answer = _git(
        tree, (*places, *arguments), CHECKOUT_TIMEOUT_S, given, {"GIT_INDEX_FILE": str(index)}
    )
    if answer.returncode != 0 and not fails:
        raise SourceError(f"git cannot check out {tree.name} to {tree}: {_last(answer)}")
    return answer.stdout


def _ask(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _git(cwd, arguments, ASK_TIMEOUT_S)


def _git(
    cwd: Path,
    arguments: Iterable[str],
    timeout_s: float,
    given: str = "",
    more: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in INHERITED}
    # Messages are read below; nobody is there to be asked; a replaced commit is another one.
    env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1"}
    try:
        return subprocess.run(
            [*GIT, *arguments],
            cwd=cwd,
            env=env | dict(more or {}),
            input=given,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SourceError("there is no git on the PATH, which finds other commits") from error
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"git did not answer within {timeout_s:g} s") from error


def _last(answer: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("fatal:")), (lines or ["no word"])[-1])
    return said.removeprefix("fatal:").removeprefix("error:").strip()


def _notes(tree: Path) -> tuple[str, ...]:
    notes = []
    if (tree / ".gitmodules").exists():
        notes.append(f"submodules are not fetched; their folders in {tree} are empty")
    attributes = tree / ".gitattributes"
    if attributes.is_file() and LFS in attributes.read_text("utf-8", errors="replace"):
        notes.append(f"files in Git LFS are not fetched; in {tree} they are pointers")
    return tuple(notes)


def _check_kind(source: Source, kind: str) -> None:
    """Refuse a kind that cannot be built from this source."""
    module, colon, _ = kind.partition(":")
    if not launcher_of(kind).can.hosted:
        raise SourceError(f"kind {kind!r} is not built from a commit; {ELSEWHERE}")
    if not colon and source.own:
        _environment(source, kind)
    elif not colon:
        raise SourceError(
            f"kind {kind!r} is not built from this repository, which is no checkout of Headway: "
            f"source = is for kinds package.module:Class; {ELSEWHERE}"
        )
    elif not _holds(source.cwd, module):
        raise SourceError(
            f"commit {source.short} has no module {module} that is found from the current "
            f"directory ({module.replace('.', '/')}.py, its package with an __init__.py)"
        )


def _holds(folder: Path, module: str) -> bool:
    """Whether a module is surely found in a folder: a package without an __init__.py would give
    way to an installed one of its name, which may well be the working tree's."""
    first = module.partition(".")[0]
    return all(
        path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
        for path in (folder / first, folder.joinpath(*module.split(".")))
    )


def _environment(source: Source, kind: str) -> str | None:
    """Return the environment that a tree of Headway runs a kind in; None for Headway's Python."""
    path = source.tree / "engines" / "envs" / "environments.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"commit {source.short} of Headway says no environments in {path}: {error}"
        ) from error
    for name, table in tables.items():
        if kind in table.get("engines", ()):
            return None if table.get("own") else name
    known = sorted(kind for table in tables.values() for kind in table.get("engines", ()))
    raise SourceError(
        f"commit {source.short} of Headway has no engine {kind!r}, only {', '.join(known)}; "
        f"{ELSEWHERE}"
    )


def _make_environment(source: Source, name: str, home: Path, say: Say) -> Path:
    # Supervised: a night that is killed does not leave an installation running.
    command = [sys.executable, "-I", str(launch.HERE / "supervise.py"), sys.executable]
    command += [str(source.boot), "headway.environment", "make", name]
    with subprocess.Popen(
        command,
        cwd=source.tree,
        env={**os.environ, "HEADWAY_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        last = ""
        for line in process.stderr:
            last = line.strip() or last
            say(line)
        answer = process.stdout.read().strip()
    python = Path(answer.splitlines()[-1] if answer else "")
    if process.returncode != 0 or not python.is_file():
        raise SourceError(f"the environment {name} of commit {source.short} was not made: {last}")
    return python
