"""GPU memory that an engine leaves behind, waited for before the next one starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

LIMIT_S, POLL_S = 60.0, 0.5
# What a driver keeps for itself, and what our own kernels allocate, moves by less; an engine that
# plans with nine tenths of a card does not miss it.
TOLERANCE_BYTES = 512 << 20


def wait_free(
    look: Callable[[], Mapping[str, float]],
    resting: Mapping[str, float],
    limit_s: float = LIMIT_S,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until each GPU uses no more memory than while it rested; one sentence if it does not.

    `look` gives the used bytes by UUID, `resting` those from before the engine before; what one of
    the two does not know is not waited for. One look is taken at least.
    """
    until_s = clock() + limit_s
    while True:
        used = look()
        above = {
            uuid: used[uuid]
            for uuid in resting
            if uuid in used and used[uuid] > resting[uuid] + TOLERANCE_BYTES
        }
        if not above:
            return None
        if clock() >= until_s:
            uuid, most = max(above.items(), key=lambda item: item[1])
            return (
                f"GPU {uuid} still used {most / 2**30:.1f} GiB after {limit_s:g} s; "
                f"it used {resting[uuid] / 2**30:.1f} GiB before the engine before this one"
            )
        sleep(POLL_S)
