"""The outputs of the timed requests are right."""

import pytest

pytestmark = pytest.mark.headway


@pytest.mark.metric("greedy_equality")
def test_greedy_equality(cell):
    """Greedy output equals transformers', token for token, at each level of load."""
    cell.check()


@pytest.mark.metric("token_accuracy")
def test_token_counts(cell):
    """Ids, usage and what was asked for agree."""
    cell.check()


@pytest.mark.metric("success_rate")
def test_success_rate(cell):
    """Every request is answered."""
    cell.check()
