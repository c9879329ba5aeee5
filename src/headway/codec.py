"""Frozen dataclasses to plain JSON values and back, checked against their own type hints."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any


class DecodeError(ValueError):
    """A JSON value does not fit the type it should have."""


SCALARS = frozenset((str, int, float, bool))


def encode(value: Any) -> Any:
    """Return `value` as JSON values; NaN and infinities are refused (rule: undefined is None)."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be stored: an undefined number is None")
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _shape(type(value)).hints}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, value: Any, where: str = "value") -> Any:
    """Return `value` as type `kind`; raises DecodeError with the path of what does not fit."""
    # Most values of a journal are such.
    if type(value) is kind and kind in SCALARS:
        return value
    origin = typing.get_origin(kind)
    if kind is Any or kind is object:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kind, value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            allowed = ", ".join(map(repr, typing.get_args(kind)))
            raise DecodeError(f"{where} is {value!r}; it must be one of {allowed}")
        return value
    if origin is tuple:
        return _decode_tuple(kind, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise DecodeError(f"{where} is {value!r}; it must be a table")
        item = typing.get_args(kind)[1]
        return {key: decode(item, v, f"{where}.{key}") for key, v in value.items()}
    return _decode_scalar(kind, value, where)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is types.NoneType:
        kind = type(None)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise DecodeError(f"{where} is {value!r}; it must be {kind.__name__}")
    return value


def _decode_union(kind: Any, value: Any, where: str) -> Any:
    if value is None and type(None) in typing.get_args(kind):
        return None
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    for option in options[:-1]:
        try:
            return decode(option, value, where)
        except DecodeError:
            continue
    return decode(options[-1], value, where)


def _decode_tuple(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise DecodeError(f"{where} is {value!r}; it must be a list")
    items = typing.get_args(kind)
    if len(items) == 2 and items[1] is Ellipsis:
        # Token ids are most of a journal: a plain list of the right scalars needs no recursion.
        if items[0] in (int, str) and all(type(v) is items[0] for v in value):
            return tuple(value)
        return tuple(decode(items[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(items) != len(value):
        raise DecodeError(f"{where} has {len(value)} entries; it must have {len(items)}")
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(decode(item, v, f"{where}[{i}]") for i, (item, v) in pairs)


class _Shape(typing.NamedTuple):
    """The types of a dataclass's fields by their names, in order, and the names without a default.

    Asked of the class once: a report holds thousands of objects of a few classes.
    """

    hints: Mapping[str, Any]
    required: tuple[str, ...]


@functools.cache
def _shape(kind: type) -> _Shape:
    fields = dataclasses.fields(kind)
    hints = typing.get_type_hints(kind)
    required = tuple(
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return _Shape({f.name: hints[f.name] for f in fields}, required)


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise DecodeError(f"{where} is {value!r}; it must be a table")
    hints, required = _shape(kind)
    if unknown := sorted(name for name in value if name not in hints):
        known = ", ".join(hints)
        raise DecodeError(f"{where}.{unknown[0]} is not known here; allowed: {known}")
    if missing := [name for name in required if name not in value]:
        raise DecodeError(f"{where}.{missing[0]} is missing")
    return kind(**{key: decode(hints[key], v, f"{where}.{key}") for key, v in value.items()})
