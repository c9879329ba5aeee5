"""The load generator: requests as bytes, sent when they are due, and what came back as records."""

from headway.loadgen.drive import Drive, Progress, Sent, drive
from headway.loadgen.payload import payload
from headway.loadgen.records import records
from headway.loadgen.share import Measured, Share, measure, merged, split
from headway.loadgen.workers import measure_with

__all__ = [
    "Drive",
    "Measured",
    "Progress",
    "Sent",
    "Share",
    "drive",
    "measure",
    "measure_with",
    "merged",
    "payload",
    "records",
    "split",
]
