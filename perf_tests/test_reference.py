"""The reference: every distinct output of the timed requests, before any verdict is given."""

import pytest

pytestmark = pytest.mark.headway


def test_verify(night_state):
    """The reference looks at each output once, in a process of its own, after all is measured."""
    night_state.verify()
