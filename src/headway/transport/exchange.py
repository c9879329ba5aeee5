"""What one request leaves on the wire: when it left, every timed piece of its answer, its end."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from headway.core import RequestError


@dataclass(slots=True)
class Body:
    """The bytes of an answer, and when they came: a stamp and a length per read, no objects.

    A read costs its payload and 16 bytes: its arrival, how far the body came with it, and how long
    it waited for the client to take it (NaN where no stamp of the kernel's says so).
    """

    data: bytearray = field(default_factory=bytearray)
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    ends: array[int] = field(default_factory=lambda: array("I"))
    lags_s: array[float] = field(default_factory=lambda: array("f"))
    _spilled: Spilled | None = None

    def stamp(self, arrived_s: float, lag_s: float) -> None:
        """Note that all bytes since the last stamp came with one read."""
        self.arrived_s.append(arrived_s)
        self.ends.append(len(self.data))
        self.lags_s.append(lag_s)

    def __iter__(self) -> Iterator[tuple[float, bytes]]:
        """Yield (arrival, bytes) of each read."""
        begin = 0
        for at_s, end in zip(self.arrived_s, self.ends, strict=True):
            yield at_s, bytes(self.data[begin:end])
            begin = end

    @property
    def held_bytes(self) -> int:
        """Return what it holds in memory, over-allocation included."""
        return sum(part.__sizeof__() for part in self._parts())

    def _parts(self) -> tuple[bytearray | array[float] | array[int], ...]:
        return self.data, self.arrived_s, self.ends, self.lags_s

    def spill(self, file: io.FileIO) -> None:
        """Move what it holds to the end of an unbuffered file."""
        offset = file.seek(0, io.SEEK_END)
        for part in self._parts():
            file.write(part)
        self._spilled = Spilled(file, offset, len(self.data), len(self.ends))
        self.data, self.arrived_s, self.ends, self.lags_s = NOTHING

    def whole(self) -> Body:
        """Return itself, or a copy in memory of what lies in a file."""
        return self if self._spilled is None else self._spilled.read()


# What a body holds whose parts lie in a file: the same for all, as nothing is added any more.
NOTHING = (bytearray(), array("d"), array("I"), array("f"))


@dataclass(frozen=True, slots=True)
class Spilled:
    """Where a body lies in a file: its bytes, then its arrays."""

    file: io.FileIO
    offset: int
    num_bytes: int
    num_reads: int

    def read(self) -> Body:
        """Return the body, in memory again."""
        self.file.seek(self.offset)
        body = Body(bytearray(self.file.read(self.num_bytes)))
        for part in (body.arrived_s, body.ends, body.lags_s):
            part.frombytes(self.file.read(self.num_reads * part.itemsize))
        return body


@dataclass(slots=True)
class Exchange:
    """One request on the wire.

    Times are those of the transport's clock. `connect_s` is None where a connection was there.
    """

    sent_s: float | None = None
    connect_s: float | None = None
    ended_s: float | None = None
    status: int | None = None
    content_type: str = ""
    body: Body = field(default_factory=Body)
    error: RequestError | None = None
    retried: bool = False

    def forget(self) -> None:
        """Become as new for a second try, but for what the first one cost."""
        self.error, self.ended_s, self.status, self.content_type = None, None, None, ""
        self.body, self.retried = Body(), True
