"""Headway's own engine: a small one to read, whose ideas are settings (docs/ladder.md)."""

from __future__ import annotations

from headway.engines.paged.engine import Paged

__all__ = ["Paged"]
