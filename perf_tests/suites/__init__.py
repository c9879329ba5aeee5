"""The suites that Headway ships, as data."""
