"""Nothing that was to be measured is missing."""

import pytest

pytestmark = pytest.mark.headway


def test_complete(complete):
    """Every launch of an instance gave a Run at every level."""
    missing = complete()
    if missing:
        pytest.fail(f"MISSING {'; '.join(missing)}", pytrace=False)
