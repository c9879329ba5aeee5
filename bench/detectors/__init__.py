"""DETBENCH: how often regression detectors cry wolf, and what they find (docs/detectors.md).

Run it from the checkout: `.venv/bin/python bench/detectors`. Not part of the wheel.
"""
