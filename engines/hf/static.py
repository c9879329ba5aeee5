"""Static batching: requests that came together are served together, until the last one ends."""

from __future__ import annotations

import time
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

KIND = "hf_static"
# While a batch fills, the loop looks for new requests this often.
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class StaticOptions:
    """Arguments: a batch starts when it is full, or when its first request waited `batch_wait_s`.

    `step_delay_s` is waited in each decode step: a slowdown of known size, to try a gate with. The
    others are those of `hf_naive`.
    """

    max_batch: int = 8
    batch_wait_s: float = 0.02
    step_delay_s: float = 0.0
    threads: int | None = None
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"{KIND}: argument max_batch must be at least 1, not {self.max_batch}")
        for name in ("batch_wait_s", "step_delay_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{KIND}: argument {name} must be 0 or more seconds")


class HfStatic:
    """Implements `contract.Engine`. Rows that ended are computed on until their batch ends."""

    def __init__(self, folder: ModelFolder, dtype: str, device: str, **args: object) -> None:
        self._options = parse_options(KIND, StaticOptions, args)
        options = self._options
        self._model = load_model(folder, dtype, device, options.attention, options.threads)
        settings = {**asdict(options), "max_num_seqs": options.max_batch}
        self.info = describe(KIND, self._model, settings)
        self._timer = StepTimer(KIND, self._model, options.max_batch)
        self._waiting: deque[tuple[Submission, float]] = deque()  # with the time of arrival
        self._rows: list[Row] = []
        self._passed: Passed | None = None

    def add(self, submission: Submission) -> None:
        """Queue a request for a batch to come."""
        self._timer.forget()
        self._waiting.append((submission, time.monotonic()))

    def abort(self, submission_id: int) -> None:
        """Forget a request; its row is held with its batch, as that of one that ended."""
        self._waiting = deque(one for one in self._waiting if one[0].id != submission_id)
        for row in self._rows:
            row.over = row.over or row.submission.id == submission_id
        self._end_batch()

    def has_work(self) -> bool:
        """Whether a batch is in work or filling."""
        return bool(self._rows or self._waiting)

    def step(self) -> list[Output]:
        """Prefill the next batch, or decode one token of each row; nothing while a batch fills."""
        if self._passed is None:
            missing_s = self._missing_s()
            if missing_s > 0:
                time.sleep(min(missing_s, POLL_S))
                return []
            size = min(self._options.max_batch, len(self._waiting))
            batch = [self._waiting.popleft()[0] for _ in range(size)]
            self._rows = [start_row(self._model, one) for one in batch]
            self._passed, logits = prefill(self._model, [one.prompt_token_ids for one in batch])
        else:
            if self._options.step_delay_s:
                time.sleep(self._options.step_delay_s)
            logits = decode(self._model, self._passed, [row.last_token for row in self._rows])
        tokens = choose(logits, self._rows)
        outputs = [
            row.take(token, self._model.eos_ids)
            for row, token in zip(self._rows, tokens, strict=True)
            if not row.over
        ]
        self._end_batch()
        return outputs

    def time_step(self, phase: Phase, batch: int, length: int) -> float:
        """Seconds of one step; ValueError for more sequences than a batch holds."""
        return self._timer.time(phase, batch, length)

    def stats(self) -> Mapping[str, float]:
        """Requests in work and waiting, rows that are held for others, and GPU memory."""
        over = sum(row.over for row in self._rows)
        return {
            "running": len(self._rows) - over,
            "waiting": len(self._waiting),
            "held_rows": over,
            **memory_stats(self._model),
        }

    def _missing_s(self) -> float:
        """Seconds until the filling batch starts, full or not."""
        if not self._waiting or len(self._waiting) >= self._options.max_batch:
            return 0.0
        return self._waiting[0][1] + self._options.batch_wait_s - time.monotonic()

    def _end_batch(self) -> None:
        if all(row.over for row in self._rows):
            self._rows, self._passed = [], None
