"""The load generator: requests as bytes, sent when they are due, and what came back as records."""

from headway.loadgen.drive import Drive, Progress, Sent, drive
from headway.loadgen.payload import payload
from headway.loadgen.records import records

__all__ = ["Drive", "Progress", "Sent", "drive", "payload", "records"]
