"""LLM.generate: everything that waits in one call, and all of it back at its end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping

from vllm import LLM, EngineArgs
from vllm.sampling_params import RequestOutputKind

from headway.engines.contract import Output, Phase, Submission
from headway.engines.models.folder import ModelFolder
from headway.engines.vllm import asking

KIND = "vllm_offline"
BATCH_WAIT_S = 0.02
# While a call fills, the loop looks for new requests this often.
POLL_S = 0.001
# How long a call has to say by itself that the process which computes is gone.
LAST_WORDS_S = 2.0


class VllmOffline:
    """Implements `contract.Engine`, a call a step. Arguments are those of vLLM's EngineArgs.

    A call begins `batch_wait_s` after its first request came, with all that have come by then. Its
    tokens leave together at its end, so that TTFT is E2EL and there is no time per token. What has
    begun cannot be aborted: nobody hears it.
    """

    def __init__(self, folder: ModelFolder, dtype: str, device: str, **args: object) -> None:
        wait_s = args.pop("batch_wait_s", BATCH_WAIT_S)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s < float("inf"):
            raise ValueError(f"{KIND}: argument batch_wait_s must be 0 or more seconds")
        self._batch_wait_s = float(wait_s)
        made = asking.arguments(KIND, EngineArgs, folder, dtype, args)
        self._llm = LLM.from_engine_args(made)
        self._eos_ids = folder.eos_ids
        more = {"batch_wait_s": self._batch_wait_s}
        self.info = asking.describe(KIND, self._llm.llm_engine.vllm_config, more)
        self._waiting: deque[tuple[Submission, float]] = deque()  # with the time of arrival
        threading.Thread(target=_end_with_core, daemon=True).start()

    def add(self, submission: Submission) -> None:
        """Queue a request for the next call."""
        asking.sampling(submission, self._eos_ids, RequestOutputKind.FINAL_ONLY)
        room = self._llm.llm_engine.vllm_config.model_config.max_model_len
        asked = len(submission.prompt_token_ids) + submission.max_tokens
        if asked > room:  # one such request would fail its whole call
            raise ValueError(f"prompt and max_tokens are {asked} tokens; max_model_len is {room}")
        self._waiting.append((submission, time.monotonic()))

    def abort(self, submission_id: int) -> None:
        """Forget a request that waits."""
        self._waiting = deque(one for one in self._waiting if one[0].id != submission_id)

    def has_work(self) -> bool:
        """Whether a call fills."""
        return bool(self._waiting)

    def step(self) -> list[Output]:
        """Make one call with all that waits; nothing while it fills."""
        missing_s = self._waiting[0][1] + self._batch_wait_s - time.monotonic()
        if missing_s > 0:
            time.sleep(min(missing_s, POLL_S))
            return []
        batch = [submission for submission, _ in self._waiting]
        self._waiting.clear()
        said = self._llm.generate(
            [asking.prompt(one) for one in batch],
            [asking.sampling(one, self._eos_ids, RequestOutputKind.FINAL_ONLY) for one in batch],
            use_tqdm=False,
        )
        return [asking.output(one.id, answer) for one, answer in zip(batch, said, strict=True)]

    def time_step(self, phase: Phase, batch: int, length: int) -> float:
        """Refuse: vLLM decides itself when it does a step."""
        raise ValueError(f"{KIND} decides itself when it does a step: none can be timed")

    def stats(self) -> Mapping[str, float]:
        """Return vLLM's gauges between two calls, and the requests that wait for the next."""
        return {**asking.stats(), "running": 0, "waiting": len(self._waiting)}


def _end_with_core() -> None:
    """End this process when vLLM's EngineCore has: a call that is on its way may wait for ever."""
    children = multiprocessing.active_children()
    if children:
        multiprocessing.connection.wait([child.sentinel for child in children])
        time.sleep(LAST_WORDS_S)
        sys.stderr.write("EngineDeadError: EngineCore encountered its end, and no call said so\n")
        sys.stderr.flush()
        os._exit(1)
