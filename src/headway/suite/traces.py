"""A recorded trace as a file: when each request came, and how long its prompt and output were."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.lengths import Trace
from headway.tables import SuiteError, json_lines

COLUMNS = ("time_s", "prompt_tokens", "output_tokens")
Row = tuple[int, Mapping[str, Any]]


def read_trace(path: Path) -> Trace:
    """Return the requests of a `.csv` (first line: names of columns) or `.jsonl` file.

    Both have `time_s`, `prompt_tokens` and `output_tokens`; what else they have is left alone.
    Times never decrease; the first one becomes 0. Raises SuiteError naming the file and line.
    """
    read = _READERS.get(path.suffix)
    if read is None:
        raise SuiteError(f"{path} must end in {' or '.join(_READERS)}: it is a trace to replay")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path} is not UTF-8 text: {error}") from error
    rows = [_checked(f"{path} line {number}", row) for number, row in read(path, lines)]
    if not rows:
        raise SuiteError(f"{path} holds no request")
    for (earlier, _, _, _), (at, _, _, where) in itertools.pairwise(rows):
        if at < earlier:
            raise SuiteError(f"{where}: time_s is {at:g} after {earlier:g}; times never decrease")
    first = rows[0][0]
    return Trace(
        path.name,
        tuple(at - first for at, _, _, _ in rows),
        tuple(prompt for _, prompt, _, _ in rows),
        tuple(output for _, _, output, _ in rows),
    )


def _csv(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise SuiteError(
            f"{path} line 1: the column {missing[0]} is missing; a trace has {', '.join(COLUMNS)}"
        )
    for row in reader:
        yield reader.line_num, row


def _jsonl(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for number, row in json_lines(path, lines):
        if not isinstance(row, dict):
            raise SuiteError(f"{path} line {number} is no JSON object with {', '.join(COLUMNS)}")
        yield number, row


_READERS: dict[str, Callable[[Path, Iterable[str]], Iterator[Row]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
}


def _checked(where: str, row: Mapping[str, Any]) -> tuple[float, int, int, str]:
    """Return a row's time and lengths, and where it stands."""
    at, *lengths = (_number(where, row, name) for name in COLUMNS)
    if at < 0:
        raise SuiteError(f"{where}: time_s is {at:g}; it must be 0 or above")
    for name, length in zip(COLUMNS[1:], lengths, strict=True):
        if length < 1 or length != int(length):
            raise SuiteError(f"{where}: {name} is {length:g}; it must be a whole number above 0")
    prompt, output = map(int, lengths)
    return at, prompt, output, where


def _number(where: str, row: Mapping[str, Any], name: str) -> float:
    """Return a finite number; text of a CSV is read as one, JSON's true and strings are not."""
    if row.get(name) is None:
        raise SuiteError(f"{where}: {name} is missing")
    value = row[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SuiteError(f"{where}: {name} is {value!r}; it must be a finite number")
    return number
