"""The specimens: engines under test, the host that serves ours, and the reference that verifies."""
