"""Whatever else a suite sets a limit on."""

import pytest

from headway import metrics

pytestmark = pytest.mark.headway

# These have a test of their own, in the files beside this one.
OWN = frozenset(
    (
        "output_throughput",
        "decode_throughput",
        "ttft_p50",
        "tpot_p50",
        "e2el_p50",
        "peak_memory",
        "success_rate",
        "token_accuracy",
    )
)


@pytest.mark.metric(*(name for name in metrics.TABLE if name not in OWN))
def test_gate(cell):
    """A metric without a test of its own keeps the limits that are set on it."""
    cell.check()
