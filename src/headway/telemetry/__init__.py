"""What server, machine and GPUs say of themselves while a Run lasts.

`python -m headway.telemetry` reads them, in a process of its own; the rest here is pure: what was
read becomes series and figures of a Run.
"""

from headway.telemetry.cpu import Ticks, others_share, read_ticks
from headway.telemetry.figures import figures
from headway.telemetry.free import wait_free
from headway.telemetry.gpus import chosen
from headway.telemetry.readings import Processes, Reading, Watched
from headway.telemetry.series import series, thinned

__all__ = [
    "Processes",
    "Reading",
    "Ticks",
    "Watched",
    "chosen",
    "figures",
    "others_share",
    "read_ticks",
    "series",
    "thinned",
    "wait_free",
]
