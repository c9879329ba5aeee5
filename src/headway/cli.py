"""The `headway` command: a thin edge over the plugin, the night and the reports."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import headway
from headway.console import CANNOT_TELL, GOOD, USAGE, UsageFailure, ended

STRICT = "what cannot be told although it should be by now fails"


Add = Callable[..., argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 good, 1 slower, wrong or missing, 2 usage, 3 cannot tell."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["env"]:
        from headway import environment

        return environment.main(words[1:])
    if words[:1] == ["baseline"]:
        from headway import baseline_cli

        return baseline_cli.main(words[1:])
    if words[:1] == ["mock-server"]:
        from headway.mock_server import command

        return command.main(words[1:])
    arguments, rest = _parser().parse_known_args(words)
    if rest and arguments.command not in (run, ab, judge):
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    return ended(lambda: arguments.command(arguments, rest))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway",
        description="Keeps LLM inference engines from getting slower or wrong.",
        epilog="Exit status: 0 good, 1 slower or wrong, 2 usage, 3 cannot tell.",
    )
    parser.add_argument("--version", action="version", version=f"headway {headway.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[..., int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    _add_measuring(add)
    _add_reading(add)
    _add_keeping(add)
    commands.add_parser("baseline", help="What results are compared with; propose, accept, show.")
    commands.add_parser("env", help="The Python environments that engines run in.")
    commands.add_parser("mock-server", help="A server whose truth is known, for load generators.")
    return parser


def _add_measuring(add: Add) -> None:
    sub = add("run", run, "Measure a suite and judge it; further options go to pytest.")
    sub.add_argument("suite", help="name of a suite, or the path of its .toml")
    _add_common(sub)
    sub.add_argument("--fresh", action="store_true", help="do not carry on an unfinished night")
    sub.add_argument("--strict", action="store_true", help=STRICT)

    sub = add("ab", ab, "Compare two engines, or two settings of one; options go to pytest.")
    sub.add_argument("a", metavar="A", help="the reference: NAME, NAME:key=value, NAME:git:REV")
    sub.add_argument("b", metavar="B", help="the candidate, likewise")
    sub.add_argument("--suite", default="quick", help="where engines and workloads come from")
    sub.add_argument("--of", metavar="NAME", help="the engine that A and B are settings of")
    pairs = sub.add_mutually_exclusive_group()
    pairs.add_argument("--pairs", type=int, metavar="N", help="so many pairs of launches")
    pairs.add_argument("--budget", metavar="10m", help="as many pairs as fit")
    sub.add_argument("--sensitivity", default="3%", metavar="5%|3%|1.5%")
    _add_common(sub, engine=False)
    sub.add_argument("--fresh", action="store_true", help="do not carry on an unfinished one")
    sub.add_argument("--strict", action="store_true", help=STRICT)

    sub = add("plan", plan, "Say what a suite would measure, in which order.")
    sub.add_argument("suite", help="name of a suite, or the path of its .toml")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    sub.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR")


def _add_reading(add: Add) -> None:
    sub = add("judge", judge, "Judge a night again from its journal; nothing is measured.")
    sub.add_argument("run", type=Path, help="folder of the night")
    sub.add_argument("--strict", action="store_true", help=STRICT)
    sub.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR")

    sub = add("gate", gate, "Turn a night into an exit status.")
    sub.add_argument("run", type=Path, help="folder of the night, or its report.json")
    sub.add_argument("--strict", action="store_true", help=STRICT)

    sub = add("compare", compare, "Compare two nights cell by cell.")
    sub.add_argument("old", type=Path, help="folder of a night, or its report.json")
    sub.add_argument("new", type=Path, help="folder of a night, or its report.json")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--strict", action="store_true", help=STRICT)


def _add_keeping(add: Add) -> None:
    add("init", init, "Write suites, baselines and reports of your own into this folder.")


def _add_common(sub: argparse.ArgumentParser, engine: bool = True) -> None:
    if engine:
        sub.add_argument("--engine", action="append", default=[], metavar="NAME")
    sub.add_argument("--level", action="append", default=[], metavar="LEVEL")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    sub.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR")
    sub.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR")


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway run SUITE [pytest options]`: pytest on the perf_tests that Headway ships."""
    try:
        arguments.reports.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageFailure(
            f"{arguments.reports} cannot be written: {error.strerror}; choose another by --reports"
        ) from error
    words = ["--headway-suite", arguments.suite, "--headway-device", arguments.device]
    for name in ("engine", "level", "set"):
        for value in getattr(arguments, name):
            words += [f"--headway-{name}", value]
    words += ["--headway-fresh"] if arguments.fresh else []
    return _pytest(arguments, [*words, *rest])


def ab(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway ab A B [pytest options]`: a suite made for it, and a night over that."""
    from headway import suite, versus
    from headway.plugin.files import suite_folders

    asked = versus.Asked(
        a=arguments.a,
        b=arguments.b,
        engine=arguments.of,
        pairs=arguments.pairs,
        budget=arguments.budget,
        sensitivity=arguments.sensitivity,
        levels=tuple(arguments.level),
    )
    try:
        path = suite.find(arguments.suite, suite_folders())
        name, text = versus.derive(path, asked, arguments.set)
    except suite.SuiteError as error:
        raise UsageFailure(str(error)) from error
    made = arguments.reports / "ab" / f"{name}.toml"
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageFailure(f"{made} cannot be written: {error.strerror}") from error
    arguments.suite, arguments.engine, arguments.level, arguments.set = str(made), [], [], []
    return run(arguments, rest)


def judge(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway judge RUN [pytest options]`: the same tests on what is in the journal."""
    arguments.reports = arguments.run.parent
    return _pytest(arguments, ["--headway-run", str(arguments.run), *rest])


def _pytest(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run pytest in this process: whoever ends `headway` ends the night."""
    import pytest

    words = ["--pyargs", "headway.perf_tests", "--import-mode=importlib", "-p", "no:cacheprovider"]
    # This module was imported before pytest could rewrite its assertions; it has none.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    words += [f"--benchmark-storage=file://{arguments.reports / 'pytest-benchmark'}"]
    words += ["--benchmark-columns=min,median,max,rounds", "--benchmark-sort=name"]
    words += ["--headway-reports", str(arguments.reports)]
    words += ["--headway-baselines", str(arguments.baselines)]
    words += ["--headway-strict"] if arguments.strict else []
    if not any(word.startswith("--junit") for word in rest):
        words += ["--junitxml", str(arguments.reports / "junit.xml")]
    status = int(pytest.main([*words, *rest]))
    # pytest's own: 2 interrupted, 3 internal error, 4 usage, 5 nothing was collected.
    return {2: CANNOT_TELL, 4: USAGE, 5: USAGE}.get(status, status)


def plan(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway plan SUITE`."""
    from headway import available, environment, outlook, suite
    from headway.plugin.files import earlier_nights, suite_folders

    try:
        loaded = suite.load(suite.find(arguments.suite, suite_folders()), arguments.set)
        loaded = available.available(loaded, (), environment.default_home(), sys.stderr.write)
        outlook.check(loaded)
    except suite.SuiteError as error:
        raise UsageFailure(str(error)) from error
    known = earlier_nights(loaded.name, arguments.reports)
    sys.stdout.write(outlook.describe(loaded, known))
    return GOOD


def gate(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway gate RUN`."""
    from headway import verdict

    document = _document(arguments.run)
    outcomes = [(cell["verdict"], cell["due"]) for cell in document["cells"]]
    code = verdict.exit_code(outcomes, arguments.strict)
    said = [c["word"] if c["word"] == verdict.WATCHED else c["verdict"] for c in document["cells"]]
    counts = [(said.count(word), word) for word in (*verdict.ORDER, verdict.WATCHED)]
    shown = ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing was judged"
    sys.stdout.write(f"{document['night']}: {shown}\n")
    for cell in document["cells"]:
        if cell["verdict"] in verdict.FAILS:
            sys.stdout.write(f"{cell['message']}\n")
    for cause in document["causes"]:
        if cause["verdict"] in verdict.FAILS:
            told = "".join(f"\n  {line}" for line in cause["explanation"])
            sys.stdout.write(f"\n{cause['headline']}{told}\n")
    return code


def compare(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway compare OLD NEW`."""
    from headway.report import compare as comparison

    try:
        old, new = _document(arguments.old), _document(arguments.new)
        found = comparison.compare(old, new, strict=arguments.strict)
    except comparison.ReportError as error:
        raise UsageFailure(str(error)) from error
    if arguments.json:
        sys.stdout.write(json.dumps(comparison.to_json(found), indent=1, allow_nan=False) + "\n")
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(comparison.render(found, width, sys.stdout.isatty()))
    return found.exit_code


def _document(path: Path) -> dict[str, Any]:
    from headway.report.document import ReportError, read_document

    file = path / "report.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFailure(f"{file} cannot be read: {error}") from error
    try:
        return read_document(text, str(file))
    except ReportError as error:
        raise UsageFailure(str(error)) from error


def init(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """`headway init`: a workspace in the current folder; nothing that is there is overwritten."""
    from headway.workspace import write_workspace

    for line in write_workspace(Path()):
        sys.stdout.write(f"{line}\n")
    return GOOD
