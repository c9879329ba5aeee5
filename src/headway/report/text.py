"""How values and foreign text are written where a person reads."""

from __future__ import annotations

from headway.verdict.causes import few

__all__ = ["NOTHING", "count", "digits", "few", "milliseconds", "percent", "plain"]

NOTHING = "-"


def plain(text: str) -> str:
    """Return a foreign text as one printable line: it can neither move a cursor nor end a row."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def digits(value: float | None) -> str:
    """Write a number with about three digits; `-` for None."""
    if value is None:
        return NOTHING
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:,.{places}f}"


def milliseconds(value_s: float | None) -> str:
    """Write seconds as a number of milliseconds; `-` for None."""
    return digits(None if value_s is None else value_s * 1e3)


def percent(change: float | None) -> str:
    """Write a relative change with its sign; `-` for None."""
    return NOTHING if change is None else f"{change:+.1%}"


def count(number: int, noun: str) -> str:
    """Write a number with its noun: 1 launch, 2 launches."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"
