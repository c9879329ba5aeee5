"""The load benchmark: what load generators measure against a server whose truth is known.

Run it from the checkout: `.venv/bin/python bench/load`; docs/load.md says how to read it. Not part
of the wheel.
"""
