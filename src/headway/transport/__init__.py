"""Sockets that send requests and stamp what comes back; nothing is parsed but HTTP framing.

A request is bytes before the Run starts. While it runs, each read is stamped and its body bytes
are kept; JSON, SSE and text wait until the request has ended. Sockets are opened by us alone: no
proxy variable is ever looked at.
"""

from headway.transport.exchange import Body, Exchange
from headway.transport.loop import run
from headway.transport.pool import HttpTransport, Transport
from headway.transport.target import Target

__all__ = ["Body", "Exchange", "HttpTransport", "Target", "Transport", "run"]
