"""Verdicts → report.json, Markdown, terminal, comparison. Returns values and strings, writes none.

`document` makes the one value that all others render; `shape` is its shape.
"""
