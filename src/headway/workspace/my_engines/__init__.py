"""Engines of one's own; a suite names one as `kind = "my_engines.echo:Echo"`."""
