"""The host: serves a step-loop engine over HTTP, in two processes.

The front (`front`, `http`, `openai`, `answer`, `text`) speaks HTTP and text; the engine process
(`loop`) speaks token ids and owns the device. They talk over a socket pair (`wire`), so that
neither disturbs the other, and what the engine stamps passes through the front unchanged.
"""
