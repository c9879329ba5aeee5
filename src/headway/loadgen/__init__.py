"""The load generator: requests as bytes, sent when they are due, and what came back as records."""

from headway.loadgen.conversation import Conversation, conversations, singles
from headway.loadgen.drive import Drive, Progress, Sent, drive
from headway.loadgen.payload import Recipient, body, payload
from headway.loadgen.records import records
from headway.loadgen.share import Measured, Share, measure, merged, split
from headway.loadgen.spool import SPILL_BYTES
from headway.loadgen.workers import measure_with

__all__ = [
    "SPILL_BYTES",
    "Conversation",
    "Drive",
    "Measured",
    "Progress",
    "Recipient",
    "Sent",
    "Share",
    "body",
    "conversations",
    "drive",
    "measure",
    "measure_with",
    "merged",
    "payload",
    "records",
    "singles",
    "split",
]
