"""Verify every distinct output of a night against transformers, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.answers import Pair, TextPair
from headway.core import Request, Verification
from headway.correctness import WIDEST
from headway.night.asked import Asked, ReferenceFailure, asked
from headway.results import Generated
from headway.workload import pair_key


@dataclass(frozen=True, slots=True)
class Reference:
    """A running reference for one model."""

    process: Asked

    def verify(self, pair: Pair | TextPair) -> Verification:
        """Judge one output: ids by one teacher-forced pass, a text by tokens that spell it."""
        # What is wrong is judged later, by each instance's own dtype.
        asked: dict[str, Any] = {"id": pair.key, "prompt": list(pair.prompt)}
        asked["banned"] = list(pair.banned)
        if isinstance(pair, Pair):
            asked |= {"op": "verify", "output": list(pair.output), "epsilon": 0.0}
        else:
            asked |= {"op": "verify_text", "text": pair.text, "max_tokens": pair.num_tokens}
            asked |= {"ignore_eos": pair.ignore_eos, "epsilon": WIDEST}
        answer = self.process.ask(**asked)
        if "error" in answer:
            return Verification(pair.key, error=answer["error"])
        return Verification(
            key=pair.key,
            num_tokens=answer["num_tokens"],
            max_gap=answer["max_gap"],
            num_nonargmax=answer["num_nonargmax"],
            min_margin=answer["min_margin"],
            nonargmax=tuple((int(i), float(g), int(r)) for i, g, r in answer["nonargmax"]),
            by=answer.get("by", "ids"),
            differs_at=answer.get("differs_at"),
        )

    def ends(self, prompt: tuple[int, ...], max_tokens: int) -> bool:
        """Whether the greedy answer comes to an end within as many tokens."""
        answer = self.process.ask(op="ends", prompt=list(prompt), max_tokens=max_tokens)
        if "error" in answer:
            raise ReferenceFailure(f"the reference cannot continue a prompt: {answer['error']}")
        return bool(answer["ends"])

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
