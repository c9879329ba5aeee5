"""The experiments: generic tests, and suites/*.toml that say what they run on."""
