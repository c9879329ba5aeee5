"""Timed bytes → the data of server-sent events, as the WHATWG standard frames them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

BOM = b"\xef\xbb\xbf"
Bytes = bytes | bytearray | memoryview


def events(chunks: Iterable[tuple[float, Bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield (arrival of the completing read, data) per event that has data.

    Lines end in LF, CRLF or CR, by bytes alone; a last event without its blank line counts.
    """
    data: list[bytes] = []
    at_s = 0.0
    for number, (at_s, whole) in enumerate(_lines(chunks)):
        line = whole.removeprefix(BOM) if number == 0 else whole
        if not line:
            if data:
                yield at_s, b"\n".join(data)
            data = []
        elif line.startswith(b"data:"):
            data.append(_value(line, 5))
        elif line == b"data":
            data.append(b"")
        elif line.startswith(b"error:"):
            # llama.cpp of early 2025 sends an error as a field of that name, not as data.
            data.append(b'{"error":' + _value(line, 6) + b"}")
    if data:
        yield at_s, b"\n".join(data)


def _value(line: bytes, start: int) -> bytes:
    return line[start + 1 :] if line[start : start + 1] == b" " else line[start:]


def _lines(chunks: Iterable[tuple[float, Bytes]]) -> Iterator[tuple[float, bytes]]:
    # The pieces of an unfinished line are joined once: adding each to what is there would cost the
    # square of its length when it comes in many small reads.
    pending: list[bytes] = []
    after_cr = False
    at_s = 0.0
    for read_s, chunk in chunks:
        if not chunk:
            continue
        at_s = read_s
        rest = bytes(chunk)
        # A CR ends its line at once; where two reads share a CRLF, the LF is swallowed here.
        if after_cr:
            rest = rest.removeprefix(b"\n")
        after_cr = rest.endswith(b"\r")
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = rest.split(b"\n")
        pending.append(first)
        if others:
            yield at_s, b"".join(pending)
            for line in others[:-1]:
                yield at_s, line
            pending = [others[-1]]
    last = b"".join(pending)
    if last:
        yield at_s, last
