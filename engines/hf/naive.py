"""One request at a time, first come first served: the server people write first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from headway.engines.contract import Output, Phase, Submission, parse_options
from headway.engines.hf.model import (
    Passed,
    Row,
    choose,
    decode,
    describe,
    load_model,
    memory_stats,
    prefill,
    start_row,
)
from headway.engines.hf.steps import StepTimer
from headway.engines.models.folder import ModelFolder

KIND = "hf_naive"


@dataclass(frozen=True, slots=True)
class NaiveOptions:
    """Arguments: torch threads (None: torch's choice), and transformers' attention by its name."""

    threads: int | None = None
    attention: str = "sdpa"


class HfNaive:
    """Implements `contract.Engine`: a prefill, then a decode step a token; others wait."""

    def __init__(self, folder: ModelFolder, dtype: str, device: str, **args: object) -> None:
        options = parse_options(KIND, NaiveOptions, args)
        self._model = load_model(folder, dtype, device, options.attention, options.threads)
        settings = {**asdict(options), "max_num_seqs": 1}
        self.info = describe(KIND, self._model, settings)
        self._timer = StepTimer(KIND, self._model, max_batch=1)
        self._waiting: deque[Submission] = deque()
        self._row: Row | None = None
        self._passed: Passed | None = None

    def add(self, submission: Submission) -> None:
        """Queue a request."""
        self._timer.forget()
        self._waiting.append(submission)

    def abort(self, submission_id: int) -> None:
        """Forget a request."""
        self._waiting = deque(one for one in self._waiting if one.id != submission_id)
        if self._row is not None and self._row.submission.id == submission_id:
            self._row = self._passed = None

    def has_work(self) -> bool:
        """Whether a request is in work or waits."""
        return self._row is not None or bool(self._waiting)

    def step(self) -> list[Output]:
        """Prefill the next request, or decode one token of the one in work."""
        if self._row is None or self._passed is None:
            row = self._row = start_row(self._model, self._waiting.popleft())
            self._passed, logits = prefill(self._model, [row.submission.prompt_token_ids])
        else:
            row = self._row
            logits = decode(self._model, self._passed, [row.last_token])
        output = row.take(choose(logits, [row])[0], self._model.eos_ids)
        if row.over:
            self._row = self._passed = None
        return [output]

    def time_step(self, phase: Phase, batch: int, length: int) -> float:
        """Seconds of one step; ValueError for more than one sequence."""
        return self._timer.time(phase, batch, length)

    def stats(self) -> Mapping[str, float]:
        """Requests in work and waiting, and GPU memory."""
        running = int(self._row is not None)
        return {"running": running, "waiting": len(self._waiting), **memory_stats(self._model)}
