"""Prompts that are sent as text, written before the first launch that needs them.

A text stands for ids only where the model's own tokenizer gives back exactly those: what was drawn
is written, read again and mended until it does, in a process that has the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core import Request
from headway.night.asked import Asked, ReferenceFailure, asked
from headway.night.lab import Writer
from headway.results import Written
from headway.workload import Prompts, prefix_groups


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


def written(
    pen: Writer, prompts: Prompts, drawn: Sequence[Request], model: str, launch: int, seed: int
) -> Written:
    """Write a workload's requests of a launch; what they shared as ids they share as text.

    A text depends on its own request and on what it shares: fewer are a prefix of more.
    """
    groups = prefix_groups(prompts.prefix, prompts.name, len(drawn), seed)
    place = f"texts/{prompts.name}/{seed}/{launch}"
    shared: dict[int, tuple[int, ...]] = {}
    found = []
    for request, group in zip(drawn, groups, strict=True):
        begins: tuple[int, ...] = ()
        if prompts.prefix is not None and group is not None and not request.turn:
            if group not in shared:
                ids = request.prompt_token_ids[: prompts.prefix.tokens]
                shared[group], _ = pen.write(ids, (), f"{place}/prefix/{group}")
            begins = shared[group]
        own = request.prompt_token_ids[len(begins) :]
        found.append(pen.write(own, begins, f"{place}/{request.index}"))
    ids_of, texts = tuple(ids for ids, _ in found), tuple(text for _, text in found)
    return Written(model, prompts.name, launch, ids_of, texts, pen.begins)
