"""The servers people write first with transformers: one request at a time, and static batches."""

from __future__ import annotations

from headway.engines.hf.naive import HfNaive
from headway.engines.hf.static import HfStatic

__all__ = ["HfNaive", "HfStatic"]
