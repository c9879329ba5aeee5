"""Throughput and latency per level, each against its limits and its baseline."""

import pytest

pytestmark = pytest.mark.headway


@pytest.mark.metric("output_throughput")
def test_output_throughput(cell):
    """Tokens per second while all slots are busy."""
    cell.check()


@pytest.mark.metric("decode_throughput")
def test_decode_throughput(cell):
    """Tokens per second while something decodes."""
    cell.check()


@pytest.mark.metric("ttft_p50")
def test_ttft(cell):
    """Time to the first token, from when the request was due."""
    cell.check()


@pytest.mark.metric("tpot_p50")
def test_tpot(cell):
    """Time per further token of a request."""
    cell.check()


@pytest.mark.metric("e2el_p50")
def test_e2el(cell):
    """Time to the last token, from when the request was due."""
    cell.check()


@pytest.mark.metric("peak_memory")
def test_memory(cell):
    """Peak resident memory of the engine's processes."""
    cell.check()


@pytest.mark.metric("launch_time")
def test_launch_time(cell):
    """From process start to the first token."""
    cell.check()
