"""One request's life in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engines.contract import Submission
from headway.engines.sampling import Sampler

# Stands for a token that has been chosen on the device and not been read yet.
UNREAD = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    Of `ids`, the first `num_computed` are in the cache, in the blocks of `block_table` in order.
    `num_cached` of its prompt were there before it came. One that is `over` gets no more tokens.
    """

    submission: Submission
    sampler: Sampler | None
    ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.ids = list(self.submission.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that are known, or chosen, and not computed: one for a sequence that decodes."""
        return len(self.ids) - self.num_computed

    @property
    def num_outputs(self) -> int:
        """Tokens chosen so far, read or not."""
        return len(self.ids) - len(self.submission.prompt_token_ids)

    @property
    def exhausted(self) -> bool:
        """Whether all its tokens have been chosen: it only waits to be read."""
        return self.num_outputs >= self.submission.max_tokens

    @property
    def num_read(self) -> int:
        """Tokens whose ids are known; what is unread stands at the end."""
        unread = 0
        while self.ids[len(self.ids) - 1 - unread] == UNREAD:
            unread += 1
        return len(self.ids) - unread
