"""The night: the plan and its order, the journal, resuming, the lock on the device."""

from headway.night.asked import ReferenceFailure
from headway.night.journal import JournalError, read
from headway.night.lab import Driven, Engine, First, Lab, Reference
from headway.night.live import LiveLaunch, measure_all, second_look
from headway.night.lock import DeviceBusy, device_lock
from headway.night.models import ModelFailure, PreparedModel, prepare
from headway.night.plan import PlannedLaunch, order
from headway.night.real import RealLab, Start
from headway.night.screen import Screen
from headway.night.session import Night, PythonFor, begin, python_of

__all__ = [
    "DeviceBusy",
    "Driven",
    "Engine",
    "First",
    "JournalError",
    "Lab",
    "LiveLaunch",
    "ModelFailure",
    "Night",
    "PlannedLaunch",
    "PreparedModel",
    "PythonFor",
    "RealLab",
    "Reference",
    "ReferenceFailure",
    "Screen",
    "Start",
    "begin",
    "device_lock",
    "measure_all",
    "order",
    "prepare",
    "python_of",
    "read",
    "second_look",
]
