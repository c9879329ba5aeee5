"""TOML read strictly: each value by its type, each error one sentence.

An error names the file, the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = re.compile(r"[a-z0-9_.]+")


class SuiteError(ValueError):
    """What is wrong with a suite, in one sentence."""


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a file's tables; `overrides` are `dotted.key=value` with a TOML value."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path} is not TOML: {error}") from error
    for text in overrides:
        _override(table, text)
    return table


def json_lines(path: Path, lines: Iterable[str | bytes]) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each line that is not blank; raises SuiteError naming the line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise SuiteError(f"{path} line {number} is not JSON: {error}") from error
        yield number, value


def find(name: str, folders: Iterable[Path]) -> Path:
    """Return the file of a suite given by name or path; the first folder that has it wins."""
    if name.endswith(".toml"):
        return Path(name)
    folders = list(folders)
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({p.stem for folder in folders for p in folder.glob("*.toml")})
    hint = difflib.get_close_matches(name, known, 1)
    raise SuiteError(
        f"there is no suite {name!r}; known: {', '.join(known) or 'none'}"
        + (f" (did you mean {hint[0]}?)" if hint else "")
    )


def write(table: Mapping[str, Any]) -> str:
    """Return tables as TOML that `read` gives back: nested ones inline, None left out."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


def _key(key: str) -> str:
    """TOML's strings are JSON's, but for one control character that JSON lets stand."""
    return json.dumps(key, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    """Strings, numbers, truth and lists are written as in JSON."""
    if isinstance(value, Mapping):
        pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _key(value) if isinstance(value, str) else json.dumps(value)


def _override(table: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    path = _dotted(key) if sign and "\n" not in text else []
    if not path:
        raise SuiteError(f"--headway-set {text!r} must look like engine.NAME.args.slower=0.1")
    parsed = parse_value(value)
    node = table
    *parents, last = path
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise SuiteError(f"--headway-set {text!r}: {parent} is not a table of the suite")
    node[last] = parsed


def parse_value(text: str) -> Any:
    """Return a TOML value; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _dotted(key: str) -> list[str]:
    """Return the parts of a dotted key, of which TOML lets one be quoted; [] for what is no key."""
    try:
        node = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return []
    path = []
    while isinstance(node, dict) and node:
        ((part, node),) = node.items()
        path.append(part)
    return path


_TYPES = {
    bool: "true or false",
    str: "a string",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a table",
}


class Reader:
    """Reads tables of one file; remembers its name for messages."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, key: str, message: str) -> SuiteError:
        """Return the error that a key is wrong."""
        return SuiteError(f"{self.path}: {key} {message}")

    def known(self, where: str, table: Mapping[str, Any], allowed: Iterable[str]) -> None:
        """Refuse keys that are not allowed."""
        allowed = sorted(allowed)
        for key in table:
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                name = f"{where}.{key}" if where else key
                raise self.fail(name, f"is not known; allowed: {', '.join(allowed)}{hint}")

    def get(self, where: str, table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
        """Return a value of the kind asked for, or the default where there is none."""
        if key not in table:
            return default
        value = table[key]
        if kind is float and type(value) is int:
            value = float(value)
        name = f"{where}.{key}" if where else key
        if type(value) is not kind:
            raise self.fail(name, f"is {value!r}; it must be {_TYPES[kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            # Nothing is below or above nan: a gate on it would never speak.
            raise self.fail(name, f"is {value!r}; it must be a finite number")
        return value

    def positive(
        self,
        where: str,
        table: Mapping[str, Any],
        key: str,
        kind: type,
        default: Any,
        most: float = math.inf,
    ) -> Any:
        """Return a value above 0 and up to `most`, or the default."""
        value = self.get(where, table, key, kind, default)
        if value is not None and not value > 0:
            raise self.fail(f"{where}.{key}", f"is {value!r}; it must be above 0")
        if value is not None and value > most:
            raise self.fail(f"{where}.{key}", f"is {value!r}; it must be at most {most}")
        return value

    def at_least_0(self, where: str, table: Mapping[str, Any], key: str, default: Any) -> Any:
        """Return a number of 0 or above, or the default."""
        value = self.get(where, table, key, float, default)
        if value is not None and value < 0:
            raise self.fail(f"{where}.{key}", f"is {value!r}; it must be 0 or above")
        return value

    def positives(
        self, where: str, table: Mapping[str, Any], key: str, names: Sequence[str]
    ) -> dict[str, float] | None:
        """Return a table of some of these names with numbers above 0; None where there is none."""
        if key not in table:
            return None
        given, where = self.get(where, table, key, dict, {}), f"{where}.{key}"
        self.known(where, given, names)
        if not given:
            raise self.fail(where, f"is empty; it holds one or more of {', '.join(names)}")
        return {name: self.positive(where, given, name, float, None) for name in given}

    def name(self, where: str, value: str) -> str:
        """Return a name that can stand in a test id."""
        if not NAME.fullmatch(value):
            raise self.fail(where, f"holds {value!r}; names use a-z, 0-9, _ and . only")
        return value

    def choice(self, where: str, value: str, allowed: Sequence[str]) -> str:
        """Return one of the allowed values."""
        if value not in allowed:
            raise self.fail(where, f"is {value!r}; allowed: {', '.join(allowed)}")
        return value

    def tables(self, table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        """Return an array of tables."""
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(key, f"must be written [[{key}]], one table each")
        return value

    def numbers(self, where: str, table: Mapping[str, Any], key: str) -> list[Any]:
        """Return a list of distinct finite numbers above 0; empty where there is none."""
        values = table.get(key, [])
        fine = isinstance(values, list) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf
            for v in values
        )
        if not fine or len(set(values)) != len(values):
            allowed = "a list of distinct numbers above 0"
            raise self.fail(f"{where}.{key}", f"is {values!r}; it must be {allowed}")
        return list(values)
