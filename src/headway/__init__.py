"""Headway: a pytest suite that keeps LLM inference engines from getting slower or wrong."""

__version__ = "0.1.0"
