"""What an answer shows of the endpoint that gave it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.core import Capabilities, Request
from headway.sse import Stream

# The fields that ask for ids, by the names that servers have for that.
ASKING_IDS = ("return_token_ids", "detokenize")
# These say that a server is busy, not that it does not understand.
BUSY = (408, 425, 429)


@dataclass(frozen=True, slots=True)
class Found:
    """What an endpoint was found to understand, and one sentence for each surprise."""

    can: Capabilities
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request; `said` is what was said instead of an answer."""

    status: int | None
    stream: Stream = field(default_factory=Stream)
    logprobs: bool = False
    said: str = ""

    @property
    def good(self) -> bool:
        """Whether it holds output: a token that is not written is counted all the same."""
        came = self.stream.events or self.stream.completion_tokens
        return self.status == 200 and bool(came) and self.stream.error is None

    @property
    def refused(self) -> bool:
        """Whether the server says that this request is none that it takes."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in BUSY

    @property
    def ids(self) -> tuple[int, ...] | None:
        """All output ids, or None when an event came without any."""
        events = self.stream.events
        if not events or any(event.token_ids is None for event in events):
            return None
        return tuple(t for event in events for t in event.token_ids or ())

    @property
    def output(self) -> object:
        """What two answers are compared by."""
        return "".join(e.text for e in self.stream.events) if self.ids is None else self.ids

    @property
    def tokens(self) -> int | None:
        """How many tokens came, by usage or else by ids."""
        counted = self.stream.completion_tokens
        return counted if counted is not None else None if self.ids is None else len(self.ids)


def optional(can: Capabilities) -> tuple[str, ...]:
    """Return the fields of a request that an endpoint may do without."""
    names = ["stream_options"] if can.usage_in_stream else []
    names += can.past_end if can.ignore_eos != "none" else []
    names += [can.salt] if can.salt is not None else []
    return (*names, *can.fields, *can.completions_fields, *can.greedy_fields)


def without(can: Capabilities, names: Sequence[str]) -> Capabilities:
    """Return what is understood when these fields are not."""
    return replace(
        can,
        usage_in_stream=can.usage_in_stream and "stream_options" not in names,
        ignore_eos="none" if set(can.past_end) & set(names) else can.ignore_eos,
        salt=None if can.salt in names else can.salt,
        fields=_left(can.fields, names),
        completions_fields=_left(can.completions_fields, names),
        greedy_fields=_left(can.greedy_fields, names),
    )


def _left(fields: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in names}


def pins(fields: Mapping[str, object]) -> tuple[str, ...]:
    """Return the fields that say how tokens are chosen: those that hold a value, not a switch."""
    return tuple(name for name, v in fields.items() if not isinstance(v, bool | Mapping))


def named_in(said: str, names: Sequence[str]) -> list[str]:
    """Return the fields that a refusal names; none where it names all that it was sent."""
    found = [n for n in names if re.search(rf"(?<!\w){re.escape(n)}(?!\w)", said)]
    return [] if len(found) == len(names) > 1 else found


def shown(said: str) -> str:
    """Return what a server said in one short line."""
    one = " ".join(said.split())
    return (one if len(one) <= 200 else one[:197] + "...") or "nothing"


def of_answer(can: Capabilities, request: Request, stream: Stream) -> Found:
    """Return what one answer shows: all that there is to ask of a host of our own."""
    draft = Draft(can)
    draft.read(request, Answer(200, stream))
    return draft.found()


@dataclass(slots=True)
class Draft:
    """A `Found` in the making."""

    can: Capabilities
    notices: list[str] = field(default_factory=list)

    def found(self) -> Found:
        """Return what it has become."""
        return Found(self.can, tuple(dict.fromkeys(self.notices)))

    def read(self, request: Request, answer: Answer) -> None:
        """Take from a plain answer what it shows of ids, counts and its end."""
        can, stream, sent = self.can, answer.stream, len(request.prompt_token_ids)
        if not request.texts and stream.prompt_tokens not in (None, sent):
            self.can = replace(self.can, ids_in=False)
            counted = f"it counts {stream.prompt_tokens} prompt tokens where {sent} ids were sent"
            self.notices.insert(0, counted)  # it may be why the launch fails
        if stream.completion_tokens is None and can.usage_in_stream:
            self.useless(["stream_options"], "no usage comes in the stream")
        if answer.ids is None and can.ids_out:
            asking = [n for n in ASKING_IDS if n in {**can.fields, **can.completions_fields}]
            self.useless(asking, "no token ids come with the output")
        self.can = replace(self.can, ids_out=answer.ids is not None)
        self._read_end(request, answer)
        self.read_cached(answer)

    def _read_end(self, request: Request, answer: Answer) -> None:
        tokens, asked = answer.tokens, request.max_tokens
        if answer.ids is not None and len(answer.ids) != tokens:
            said = f"its usage counts {tokens} output tokens where {len(answer.ids)} ids came"
            self.notices.append(said)
        stopped = answer.stream.finish_reason == "stop"
        early = stopped if tokens is None else tokens < (asked or 0)
        if early and request.ignore_eos and self.can.ignore_eos != "none":
            where = "before" if tokens is None else f"after {tokens} of"
            self.useless(list(self.can.past_end), f"it ended {where} {asked} tokens")

    def read_cached(self, answer: Answer) -> None:
        """Note that usage says how much of a prompt was cached; many say nothing instead of 0."""
        if answer.stream.cached_prompt_tokens is not None:
            self.can = replace(self.can, cached_tokens=True)

    def read_end_mark(self, forced: Answer, eos_id: int, asked: int) -> str | None:
        """Take what a forced end mark did; return why that proves nothing, or None."""
        if forced.status != 200 or forced.stream.error is not None:
            return shown(forced.said)
        if forced.tokens is None and forced.stream.events:
            return "the answer's tokens are not counted"
        if (forced.tokens or 0) < asked:
            self.useless(
                list(self.can.past_end), f"the end mark ends an answer of {asked} tokens early"
            )
            return None
        if forced.ids is None:
            return "the end mark cannot be seen without token ids"
        emitted = eos_id in forced.ids
        if emitted != (self.can.ignore_eos == "emit"):
            does = "emitted" if emitted else "banned"
            self.notices.append(f"with ignore_eos the end mark is {does}, which is not documented")
        self.can = replace(self.can, ignore_eos="emit" if emitted else "ban")
        return None

    def useless(self, names: Sequence[str], what: str) -> None:
        """Note a field that is taken without a word and without effect; it is not sent again."""
        taken = f"{', '.join(names)} {_is(names)} accepted, yet " if names else ""
        self.notices.append(taken + what)
        self.can = without(self.can, names)

    def refused(self, names: Sequence[str], answer: Answer) -> None:
        """Note fields that are not sent, and what the server said to them."""
        status = "" if answer.status is None else f" {answer.status}"
        said = f"it answered{status} {shown(answer.said)}"
        self.notices.append(f"{', '.join(names)} {_is(names)} not sent to it: {said}")
        self.can = without(self.can, names)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
