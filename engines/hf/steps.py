"""How long one step takes, alone: for the tests that time steps and not a served load."""

from __future__ import annotations

import time

import torch

from headway.engines.contract import Phase, check_step, step_prompt
from headway.engines.hf.model import LoadedModel, Passed, decode, prefill


class StepTimer:
    """Times steps of a model. The cache of the last decode step is kept until `forget`."""

    def __init__(self, kind: str, model: LoadedModel, max_batch: int) -> None:
        self._kind = kind
        self._model = model
        self._max_batch = max_batch
        self._prepared: tuple[int, int, Passed] | None = None

    def time(self, phase: Phase, batch: int, length: int) -> float:
        """Seconds of one prefill of `length` tokens, or one decode step after them.

        From ids on the host to ids on the host; the cache of a decode step is made before.
        """
        longest = self._model.folder.context_length
        check_step(self._kind, phase, batch, length, self._max_batch, longest)
        if phase == "prefill":
            return self._timed(None, self._prompts(batch, length))
        if self._prepared is None or self._prepared[:2] != (batch, length):
            self._prepared = None  # two caches at a time might not fit
            passed, _ = prefill(self._model, self._prompts(batch, length))
            self._prepared = (batch, length, passed)
        passed = self._prepared[2]
        positions = passed.positions
        seconds = self._timed(passed, [[1]] * batch)
        passed.cache.crop(-1)
        passed.positions = positions
        return seconds

    def forget(self) -> None:
        """Give the memory of a prepared cache back."""
        self._prepared = None

    def _timed(self, passed: Passed | None, ids: list[list[int]]) -> float:
        self._synchronize()
        started_s = time.perf_counter()
        if passed is None:
            _, logits = prefill(self._model, ids)
        else:
            logits = decode(self._model, passed, [row[0] for row in ids])
        logits.float().argmax(dim=-1).tolist()
        self._synchronize()
        return time.perf_counter() - started_s

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        vocab_size = self._model.folder.vocab_size
        return [list(step_prompt(row, length, vocab_size)) for row in range(batch)]
