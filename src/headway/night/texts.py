"""A model's tokenizer, in a process of its own, which writes prompts as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.night.asked import Asked, ReferenceFailure, asked


@dataclass(frozen=True, slots=True)
class TokenizerProcess:
    """A model's tokenizer at work; `begins` are the ids that it puts before a text by itself."""

    process: Asked
    begins: tuple[int, ...]

    def write(
        self, ids: Sequence[int], fixed: Sequence[int], seed: str
    ) -> tuple[tuple[int, ...], str]:
        """Return as many ids as `fixed` and `ids`, which begin with `fixed`, and their text.

        A pure function of what is given; raises ReferenceFailure where there is no such text.
        """
        answer = self.process.ask(ids=list(ids), fixed=list(fixed), seed=seed)
        if "error" in answer:
            raise ReferenceFailure(answer["error"])
        return tuple(answer["ids"]), answer["text"]


@contextmanager
def writer(
    python: Path, model: Mapping[str, Any], log: Path, say: Callable[[str], None]
) -> Iterator[TokenizerProcess]:
    """Start a model's tokenizer; it ends with the block, or with us."""
    say(f"tokenizer of {model['name']}: loading")
    what = f"the tokenizer of {model['name']}"
    with asked(python, "headway.engines.texts", model, log, what) as (process, ready):
        yield TokenizerProcess(process, tuple(ready["begins"]))
