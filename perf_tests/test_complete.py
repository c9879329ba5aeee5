"""Nothing that was to be measured is missing."""

import pytest

pytestmark = pytest.mark.headway


def test_complete(complete):
    """Every launch of an instance gave a Run at every level."""
    missing, lost, unpaid = complete()
    if missing:
        pytest.fail(f"MISSING {'; '.join([*missing, *lost])}", pytrace=False)
    if lost:
        pytest.fail(f"INVALID {'; '.join(lost)}", pytrace=False)
    if unpaid:
        pytest.skip(f"INCONCLUSIVE budget: {unpaid[0]} (and {len(unpaid) - 1} more)")
