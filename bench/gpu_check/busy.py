"""How long a GPU was at work, by the driver's own records of its kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headway.metrics.run import union_length


class Watch:
    """`busy_s` is how long kernels ran while `around` was open; None where nobody may know."""

    def __init__(self) -> None:
        self.busy_s: float | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Watch the GPU; what runs in here is slower for it, but not its kernels."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type == DeviceType.CUDA
        ]
        self.busy_s = union_length(spans) / 1e6 if spans else None
