"""Frozen dataclasses to plain JSON values and back, checked against their own type hints."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any


class DecodeError(ValueError):
    """A JSON value does not fit the type it should have."""


def encode(value: Any) -> Any:
    """Return `value` as JSON values; NaN and infinities are refused (rule: undefined is None)."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be stored: an undefined number is None")
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, value: Any, where: str = "value") -> Any:
    """Return `value` as type `kind`; raises DecodeError with the path of what does not fit."""
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


_HINTS: dict[type, dict[str, Any]] = {}


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise DecodeError(f"{where} is {value!r}; it must be a table")
    hints = _HINTS.get(kind) or _HINTS.setdefault(kind, typing.get_type_hints(kind))
    unknown = sorted(set(value) - {f.name for f in dataclasses.fields(kind)})
    if unknown:
        known = ", ".join(f.name for f in dataclasses.fields(kind))
        raise DecodeError(f"{where}.{unknown[0]} is not known here; allowed: {known}")
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise DecodeError(f"{where}.{missing[0]} is missing")
    return kind(**{key: decode(hints[key], v, f"{where}.{key}") for key, v in value.items()})
