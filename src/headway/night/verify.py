"""Verify every distinct output of a night against transformers, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core import Request, Verification
from headway.correctness import Pair
from headway.night.asked import Asked, ReferenceFailure, asked
from headway.results import Generated
from headway.workload import pair_key


@dataclass(frozen=True, slots=True)
class Reference:
    """A running reference for one model."""

    process: Asked

    def verify(self, pair: Pair) -> Verification:
        """Judge one output by one teacher-forced pass."""
        answer = self.process.ask(
            op="verify",
            id=pair.key,
            prompt=list(pair.prompt),
            output=list(pair.output),
            banned=list(pair.banned),
            epsilon=0.0,  # what is wrong is judged later, by each instance's own dtype
        )
        if "error" in answer:
            return Verification(pair.key, error=answer["error"])
        return Verification(
            key=pair.key,
            num_tokens=answer["num_tokens"],
            max_gap=answer["max_gap"],
            num_nonargmax=answer["num_nonargmax"],
            min_margin=answer["min_margin"],
            nonargmax=tuple((int(i), float(g), int(r)) for i, g, r in answer["nonargmax"]),
        )

    def generate(self, request: Request, banned: tuple[int, ...]) -> Generated:
        """Have the reference continue a prompt by its own `generate`, without ids `banned`."""
        key = pair_key(request.prompt_token_ids, (), banned)
        answer = self.process.ask(
            op="generate",
            id=key,
            prompt=list(request.prompt_token_ids),
            banned=list(banned),
            max_tokens=request.max_tokens or 1,
            ignore_eos=request.ignore_eos,
        )
        if "error" in answer:
            raise ReferenceFailure(f"the reference cannot continue a prompt: {answer['error']}")
        return Generated(key, tuple(answer["output"]), tuple(map(float, answer["margins"])))


@contextmanager
def reference(
    python: Path, model: Mapping[str, Any], device: str, log: Path, say: Callable[[str], None]
) -> Iterator[Reference]:
    """Start the reference for a model; it ends with the block, or with us."""
    say(f"reference for {model['name']}: loading")
    module, options = "headway.engines.reference", ("--device", device)
    with asked(python, module, model, log, "the reference", *options) as (process, _):
        yield Reference(process)
