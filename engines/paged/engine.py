"""The engine: requests in, one pass a step, tokens out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import transformers

from headway import __version__
from headway.core import EngineInfo
from headway.engines.contract import (
    Output,
    Phase,
    Submission,
    check_step,
    parse_options,
    step_prompt,
)
from headway.engines.models.folder import ModelFolder
from headway.engines.paged.batch import Batch, Carried, Chosen, build
from headway.engines.paged.blocks import BlockManager
from headway.engines.paged.options import KIND, RUNGS, PagedOptions
from headway.engines.paged.runner import Runner
from headway.engines.paged.scheduler import Scheduled, Scheduler
from headway.engines.paged.sequence import UNREAD
from headway.engines.paged.sequence import Sequence as Running
from headway.engines.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that was launched: what it chose for `sequences`, at their `places`."""

    chosen: Chosen
    sequences: tuple[Running, ...]
    places: tuple[int, ...]


class Paged:
    """Implements `contract.Engine`: continuous batching over a paged cache, on any rung."""

    def __init__(self, folder: ModelFolder, dtype: str, device: str, **args: object) -> None:
        self._options = options = parse_options(KIND, PagedOptions, args)
        self._rung = RUNGS[options.rung]
        self._runner = runner = Runner(folder, dtype, device, options)
        self._eos_ids = frozenset(folder.eos_ids)
        self._blocks = BlockManager(runner.num_blocks, runner.block_size, options.prefix_caching)
        self._scheduler = Scheduler(runner.policy, self._blocks)
        self._known: dict[int, Running] = {}
        gains = self._rung.graphs and runner.device.type == "cuda"
        self._overlap = gains if options.overlap is None else options.overlap
        self._flight: Flight | None = None
        self._held = self._filled = 0  # slots held, and tokens they are for, summed over passes
        self.info = self._describe(folder)

    def add(self, submission: Submission) -> None:
        """Queue a request; raises ValueError for one that could never be held."""
        longest = len(submission.prompt_token_ids) + submission.max_tokens
        held = self._runner.num_blocks * self._runner.block_size
        most = min(self._runner.max_model_len, held)
        if longest > most:
            raise ValueError(
                f"prompt and output are {longest} tokens, and {most} are the most that fit: "
                f"max_model_len is {self._runner.max_model_len}, the cache holds {held}"
            )
        sequence = Running(submission, Sampler.of(submission, self._runner.device))
        self._known[submission.id] = sequence
        self._scheduler.add(sequence)

    def abort(self, submission_id: int) -> None:
        """Forget a request; what is in flight for it is not heard."""
        sequence = self._known.pop(submission_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def has_work(self) -> bool:
        """Whether anything waits, runs, or is in flight."""
        return bool(self._known) or self._flight is not None

    def step(self) -> list[Output]:
        """Launch the next pass, and read the one before it where steps overlap, else this one."""
        if (profile := self._runner.profile) is None:
            return self._step()
        with profile.part("step"):
            return self._step()

    def time_step(self, phase: Phase, batch: int, length: int) -> float:
        """Seconds of one pass over `batch` sequences, from ids on the host to ids on the host.

        A decode step finds `length` tokens in the cache, what they are does not matter to it; or
        passes them again, where the rung keeps none.
        Raises ValueError for what it cannot hold.
        """
        self._check(phase, batch, length)
        start = length if phase == "decode" and not self._rung.recompute else 0
        vocab_size = self._runner.weights.shape.vocab_size
        sequences = []
        for row in range(batch):
            ids = step_prompt(row, length + (phase == "decode"), vocab_size)
            sequences.append(Running(Submission(row, ids, 1, salt="time_step"), None))
            begun = self._blocks.begin(sequences[-1])
            assert begun, "blocks are missing that were counted before"
        planned = [Scheduled(one, start, len(one.ids) - start) for one in sequences]
        started_s = time.perf_counter()
        self._runner.run(self._lay_out(planned), [None] * batch).tolist()
        seconds = time.perf_counter() - started_s
        for one in sequences:
            self._blocks.release(one)
        return seconds

    def stats(self) -> Mapping[str, float]:
        """Return gauges, and counters since the start.

        `kv_held_total` are slots of blocks that sequences hold, `kv_filled_total` those of them
        that are for a token, both summed over passes: the rest is waste.
        """
        seen, blocks = self._scheduler.seen, self._blocks
        used = blocks.num_blocks - blocks.num_available
        found = {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "kv_usage": used / blocks.num_blocks,
            "kv_used_blocks": used,
            "kv_cached_blocks": blocks.num_cached,
            "kv_free_blocks": blocks.num_available - blocks.num_cached,
            "kv_held_total": self._held,
            "kv_filled_total": self._filled,
            "preemptions_total": seen.preempted,
            "chunked_total": seen.chunked,
            "mixed_total": seen.mixed,
            "blocks_reused_total": blocks.num_reused,
            "most_rows": seen.most_rows,
        }
        if self._options.prefix_caching:
            found["prefix_queries_total"] = blocks.num_queried
            found["prefix_hits_total"] = blocks.num_hit
        if self._runner.profile is not None:
            found |= self._runner.profile.stats()
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, sequences and slots contradict each other."""
        running = self._scheduler.running
        self._blocks.check_integrity(running)
        assert len(running) <= self._runner.policy.max_num_seqs, "too many run"
        assert not any(one.block_table for one in self._scheduler.waiting), "who waits holds blocks"
        known = {id(one) for one in self._known.values()}
        assert known == {id(one) for one in (*running, *self._scheduler.waiting)}, "lost"

    def _step(self) -> list[Output]:
        launched = self._launch()
        if self._overlap:
            launched, self._flight = self._flight, launched
        return self._land(launched) if launched is not None else []

    def _launch(self) -> Flight | None:
        planned = self._scheduler.plan()
        if not planned:
            return None
        ending = tuple(one.sequence for one in planned if one.ends)
        samplers = [one.sampler for one in ending]
        chosen = Chosen.of(
            self._runner.run(self._lay_out(planned), samplers, self._carried(planned))
        )
        for one in planned:
            self._count(one)
        for sequence in ending:
            sequence.ids.append(UNREAD)
        return Flight(chosen, ending, tuple(len(one.ids) - 1 for one in ending))

    def _carried(self, planned: Sequence[Scheduled]) -> Carried | None:
        """Return which rows begin with a token that is in flight; None where none does."""
        if self._flight is None:
            return None
        flown = {id(one): place for place, one in enumerate(self._flight.sequences)}
        pairs = [
            (row, flown[id(one.sequence)])
            for row, one in enumerate(planned)
            if one.sequence.ids[one.start + one.count - 1] == UNREAD
        ]
        rows, places = zip(*pairs, strict=True) if pairs else ((), ())
        return Carried(self._flight.chosen.on_device, rows, places) if pairs else None

    def _count(self, one: Scheduled) -> None:
        sequence = one.sequence
        sequence.num_computed = one.start + one.count
        self._held += len(sequence.block_table) * self._blocks.block_size
        self._filled += len(sequence.ids)

    def _land(self, flight: Flight) -> list[Output]:
        outputs = []
        tokens = flight.chosen.read()
        for token, sequence, place in zip(tokens, flight.sequences, flight.places, strict=True):
            if sequence.over:
                continue
            sequence.ids[place] = token
            outputs.append(self._take(sequence, token, place))
        return outputs

    def _take(self, sequence: Running, token: int, place: int) -> Output:
        submission = sequence.submission
        num_tokens = place + 1 - len(submission.prompt_token_ids)
        reason = submission.ends_with(token, num_tokens, self._eos_ids)
        self._blocks.remember(sequence)
        if reason is not None:
            del self._known[submission.id]
            self._scheduler.remove(sequence)
        elif self._rung.recompute:
            sequence.num_computed = 0
        cached = sequence.num_cached if self._options.prefix_caching else None
        return Output(submission.id, (token,), reason, cached=cached)

    def _lay_out(self, planned: Sequence[Scheduled]) -> Batch:
        return build([one.row() for one in planned], self._runner.block_size)

    def _check(self, phase: Phase, batch: int, length: int) -> None:
        policy = self._runner.policy
        check_step(KIND, phase, batch, length, policy.max_num_seqs, self._runner.max_model_len)
        needed = batch * self._blocks.blocks_for(length + (phase == "decode"))
        if needed > self._runner.num_blocks:
            raise ValueError(
                f"{batch} sequences of {length} tokens need {needed} blocks, and the cache has "
                f"{self._runner.num_blocks}"
            )

    def _describe(self, folder: ModelFolder) -> EngineInfo:
        runner = self._runner
        settings = {
            **{key: value for key, value in asdict(self._options).items() if value is not None},
            "max_num_seqs": runner.policy.max_num_seqs,
            "max_num_batched_tokens": runner.policy.max_num_batched_tokens,
            "max_model_len": runner.max_model_len,
            "block_size": runner.block_size,
            "num_blocks": runner.num_blocks,
            "cache_bytes": runner.cache.keys.nbytes + runner.cache.values.nbytes,
            "weight_bytes": runner.weights.num_bytes,
            "overlap": self._overlap,
            "context_length": folder.context_length,
            "model_revision": folder.revision,
            "threads": torch.get_num_threads(),
            **runner.names(),
        }
        return EngineInfo(
            kind=KIND,
            version=__version__,
            model=folder.name,
            dtype=str(runner.weights.embedding.dtype).removeprefix("torch."),
            device=str(runner.device),
            settings=settings,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
        )
