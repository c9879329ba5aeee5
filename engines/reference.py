"""The reference: transformers in fp32, as a process that judges other engines' outputs.

    python boot.py headway.engines.reference --model-json '{…}' [--device cpu]

It answers as `headway.engines.lines` says; with "ready" come the versions it stands on. Outputs are
judged token by token on their own prefix, so that it does not matter where an engine parts from
the reference's own text. One that came as text is judged by the tokens that spell it. The model
`fake` is judged without torch.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from headway.engines import lines, texts
from headway.engines.lines import RefusedRequestError, read_ids
from headway.engines.models import spelling
from headway.engines.models.folder import ModelError, ModelFolder
from headway.engines.models.scores import Scores, summarise
from headway.engines.models.spelling import Option, Options

FAKE_GAP = 10.0
# Judge ids; judge a text of `max_tokens` tokens; does the greedy answer end within as many?; write.
OPS = ("verify", "verify_text", "ends", "generate")


class Reference(Protocol):
    """Something that knows the right tokens of a model."""

    versions: Mapping[str, str]

    def score(
        self, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()
    ) -> Scores:
        """Judge an output by its best of all ids but the `banned`, which are nobody's choice.

        RefusedRequestError when it cannot be judged.
        """

    def generate(
        self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool, banned: Sequence[int] = ()
    ) -> list[int]:
        """Return the greedy continuation without the `banned` ids."""

    def options(self, prompt: Sequence[int], epsilon: float, banned: Sequence[int] = ()) -> Options:
        """Continue a prompt by whichever tokens are sent; yields those within `epsilon` logits."""


class TorchReference:
    """A transformers model in fp32; see `headway.engines.models.scoring`."""

    def __init__(self, folder: ModelFolder, device: str) -> None:
        import torch
        import transformers

        from headway.engines.models import loading, scoring

        self.versions: Mapping[str, str] = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        self._eos_ids = folder.eos_ids
        self._scoring = scoring
        self._model = loading.load(folder, "float32", device)
        self._out_of_memory: type[Exception] = torch.OutOfMemoryError

    def score(
        self, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()
    ) -> Scores:
        """Judge an output; RefusedRequestError when it cannot be judged."""
        with self._refusing():
            scores: Scores = self._scoring.score(self._model, prompt, output, banned)
        return scores

    def generate(
        self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool, banned: Sequence[int] = ()
    ) -> list[int]:
        """Return transformers' own greedy continuation."""
        eos_ids = () if ignore_eos else self._eos_ids
        with self._refusing():
            made: list[int] = self._scoring.generate(
                self._model, prompt, max_tokens, eos_ids, banned
            )
        return made

    def options(self, prompt: Sequence[int], epsilon: float, banned: Sequence[int] = ()) -> Options:
        """Continue a prompt token by token; RefusedRequestError when it cannot be."""
        with self._refusing():
            yield from self._scoring.options(self._model, prompt, epsilon, banned)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except self._scoring.NotFiniteError as error:
            raise RefusedRequestError(str(error)) from error
        except self._out_of_memory as error:
            raise RefusedRequestError(
                "the reference's device has no memory for a sequence of this length"
            ) from error


class FakeReference:
    """The token function of the `fake` engine: right tokens have gap 0, wrong ones `FAKE_GAP`."""

    versions: Mapping[str, str] = {}

    def score(
        self, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()
    ) -> Scores:
        """Judge each token by what the function says at its place."""
        right = self.generate(prompt, len(output), ignore_eos=True, banned=banned)
        wrong = [token != best for token, best in zip(output, right, strict=True)]
        return Scores(
            gaps=[FAKE_GAP if is_wrong else 0.0 for is_wrong in wrong],
            ranks=[int(is_wrong) for is_wrong in wrong],
            margins=[FAKE_GAP] * len(output),
            best=right,
            logprobs=[-FAKE_GAP if is_wrong else 0.0 for is_wrong in wrong],
        )

    def generate(
        self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool, banned: Sequence[int] = ()
    ) -> list[int]:
        """Return the function's tokens; it knows no end of text. After a banned one comes the
        next by number."""
        from headway.engines.fake import VOCAB_SIZE, fake_tokens

        def allowed(token: int) -> int:
            return next(t % VOCAB_SIZE for t in itertools.count(token) if t not in banned)

        return [allowed(token) for token in fake_tokens(prompt, max_tokens)]

    def options(self, prompt: Sequence[int], epsilon: float, banned: Sequence[int] = ()) -> Options:
        """Continue with the function's tokens, whatever comes; it knows no tie."""
        for count in itertools.count(1):
            right = self.generate(prompt, count, ignore_eos=True, banned=banned)[-1]
            yield [Option(right, margin=FAKE_GAP)]


def open_reference(folder: ModelFolder, device: str) -> Reference:
    """Return the reference for a model, loaded; ModelError when it cannot be."""
    return FakeReference() if folder.name == "fake" else TorchReference(folder, device)


def answer(reference: Reference, folder: ModelFolder, line: str) -> dict[str, Any]:
    """Return the answer to one request line: a verdict, an output, or an `error` sentence.

    An output comes with its `margins`: how far it was from another one, token by token.
    """
    return lines.answer(lambda request: _carry_out(reference, folder, request), line)


def _carry_out(
    reference: Reference, folder: ModelFolder, request: Mapping[str, Any]
) -> dict[str, Any]:
    op = request.get("op")
    if op not in OPS:
        raise RefusedRequestError(f"op must be {' or '.join(OPS)}, not {op!r}")
    prompt = read_ids(request, "prompt", folder.vocab_size)
    banned = read_ids({"banned": [], **request}, "banned", folder.vocab_size, least=0)
    if op != "verify":
        max_tokens = _read_max_tokens(request)
        _check_length(len(prompt) + max_tokens, folder)
    if op == "verify_text":
        ends = () if _read_ignore_eos(request) else folder.eos_ids
        given = spelling.Text(_read_text(request), max_tokens, ends, banned)
        return spelling.judge(reference, _load(folder), prompt, given, _read_epsilon(request))
    if op == "ends":
        made = reference.generate(prompt, max_tokens, ignore_eos=False)
        return {"ends": not set(made).isdisjoint(folder.eos_ids)}
    if op == "generate":
        made = reference.generate(prompt, max_tokens, _read_ignore_eos(request), banned)
        margins = reference.score(prompt, made, banned).margins if made else []
        return {"output": made, "margins": margins}
    output = read_ids(request, "output", folder.vocab_size)
    epsilon = _read_epsilon(request)
    _check_length(len(prompt) + len(output), folder)
    return summarise(reference.score(prompt, output, banned), output, epsilon)


@functools.lru_cache(maxsize=1)
def _load(folder: ModelFolder) -> texts.Tokenizer:
    try:
        return texts.load(folder)
    except ModelError as error:
        raise RefusedRequestError(str(error)) from error


def _read_text(request: Mapping[str, Any]) -> str:
    value = request.get("text")
    if not isinstance(value, str):
        raise RefusedRequestError(f"text must be a text, not {value!r}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RefusedRequestError("text holds half a surrogate pair, which no token writes")
    return value


def _read_max_tokens(request: Mapping[str, Any]) -> int:
    value = request.get("max_tokens")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RefusedRequestError(f"max_tokens must be an integer of 1 or more, not {value!r}")
    return value


def _read_ignore_eos(request: Mapping[str, Any]) -> bool:
    value = request.get("ignore_eos", False)
    if not isinstance(value, bool):
        raise RefusedRequestError(f"ignore_eos must be true or false, not {value!r}")
    return value


def _read_epsilon(request: Mapping[str, Any]) -> float:
    value = request.get("epsilon")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise RefusedRequestError(f"epsilon must be a number of logits, 0 or more, not {value!r}")
    return value


def _check_length(num_tokens: int, folder: ModelFolder) -> None:
    if num_tokens > folder.context_length:
        raise RefusedRequestError(
            f"prompt and output are {num_tokens} tokens, more than the {folder.context_length} "
            f"of {folder.name}'s context"
        )


def _open(
    folder: ModelFolder, arguments: argparse.Namespace
) -> tuple[dict[str, Any], lines.CarryOut]:
    reference = open_reference(folder, arguments.device)
    ready = {"versions": dict(reference.versions)}
    return ready, lambda request: _carry_out(reference, folder, request)


def main() -> None:
    """Serve stdin until it closes; exit 1 with one sentence when the model cannot be loaded."""
    parser = argparse.ArgumentParser(prog="headway.engines.reference", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: cpu)")
    lines.main(parser, _open)


if __name__ == "__main__":
    main()
