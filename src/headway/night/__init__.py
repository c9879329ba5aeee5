"""The night: the plan and its order, the journal, resuming, the lock on the device."""

from headway.night.journal import JournalError, read
from headway.night.live import LiveLaunch, measure_all
from headway.night.lock import DeviceBusy, device_lock
from headway.night.models import ModelFailure, PreparedModel, prepare
from headway.night.plan import PlannedLaunch, order
from headway.night.session import Night, Screen, begin, python_of
from headway.night.verify import ReferenceFailure

__all__ = [
    "DeviceBusy",
    "JournalError",
    "LiveLaunch",
    "ModelFailure",
    "Night",
    "PlannedLaunch",
    "PreparedModel",
    "ReferenceFailure",
    "Screen",
    "begin",
    "device_lock",
    "measure_all",
    "order",
    "prepare",
    "python_of",
    "read",
]
