"""A whole engine, as small as one can be; `headway run mine` measures it.

It has no model: its tokens come from a function that the reference of the model `fake` knows too,
so that they can be verified. To make it your own engine, load a model in `__init__`, do a prefill
or a decode step in `step`, and name that model in suites/mine.toml.

Headway starts it in a process of its own and serves it over HTTP; nothing here knows about that.
The methods are called from one thread, one at a time. Everything an engine must offer is in
`headway.engines.contract`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from headway.core import EngineInfo
from headway.engines.contract import Output, Phase, Submission, parse_options
from headway.engines.fake import FIRST_ID, fake_tokens
from headway.engines.models.folder import ModelFolder


@dataclass(frozen=True, slots=True)
class Options:
    """What a suite may say in `args`: their names, types and defaults.

    `step_s` is how long a step takes. `wrong` plants a fault, to see it caught: the second token
    of every answer is another one than it should be.
    """

    step_s: float = 0.01
    wrong: bool = False


class Echo:
    """Serves all requests together: each step gives one token to each of them."""

    def __init__(self, folder: ModelFolder, dtype: str, device: str, **args: object) -> None:
        """Load. `folder.path` is where the weights would be; `device` is `cpu` or `cuda`."""
        self._options = parse_options("echo", Options, args)
        self._running: dict[int, deque[int]] = {}  # the tokens that each request still gets
        # Who answers, for the report: read back from what runs, not copied from what was asked.
        self.info = EngineInfo(
            kind="echo",
            version="1",
            model=folder.name,
            dtype=dtype,
            device=device,
            settings=asdict(self._options),
        )

    def add(self, submission: Submission) -> None:
        """Take a request in; nothing is computed yet. ValueError refuses one."""
        tokens = fake_tokens(submission.prompt_token_ids, submission.max_tokens)
        if self._options.wrong and len(tokens) > 1:
            tokens[1] = FIRST_ID if tokens[1] != FIRST_ID else FIRST_ID + 1
        self._running[submission.id] = deque(tokens)

    def abort(self, submission_id: int) -> None:
        """Forget a request whose client is gone; it may have ended already."""
        self._running.pop(submission_id, None)

    def has_work(self) -> bool:
        """Whether `step` would do anything: as long as it would, it is called again and again."""
        return bool(self._running)

    def step(self) -> list[Output]:
        """Do one step, and return what it gave. Each token is stamped when this returns."""
        time.sleep(self._options.step_s)  # here a model would work
        outputs = []
        for id, tokens in self._running.items():
            token = tokens.popleft()
            outputs.append(Output(id, (token,), None if tokens else "length"))
        # A finish reason ends a request: "length" when it has all its tokens, "stop" when the model
        # ended it and the request does not say `ignore_eos`.
        self._running = {id: tokens for id, tokens in self._running.items() if tokens}
        return outputs

    def time_step(self, phase: Phase, batch: int, length: int) -> float:
        """Seconds of one step over `batch` sequences of `length` tokens, for `test_step`.

        ValueError, one sentence, for a batch or a length that the engine cannot hold.
        """
        started_s = time.perf_counter()
        time.sleep(self._options.step_s)
        return time.perf_counter() - started_s

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters for /metrics."""
        return {"running": len(self._running), "waiting": 0}
