"""Prompts that cannot be sent as they are drawn are fixed before the first launch that needs them.

A prompt that is sent as text stands for ids only where the model's own tokenizer gives back exactly
those: what was drawn is written, read again and mended until it does. And where an engine of the
suite cannot go on past the end of an answer, a prompt that the model answers with an early end is
drawn anew, for all engines, so that all of them do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from headway import questions
from headway.core import Case, Request
from headway.engines.servers import launcher_of
from headway.night.asked import ReferenceFailure
from headway.night.lab import Reference, Writer
from headway.night.plan import PRIMING
from headway.night.session import Night
from headway.results import Written, launch_key
from headway.suite import Suite
from headway.workload import Prompts, continued, prefix_groups

# Half of all prompts may end early, and one in a million is given up.
MOST_DRAWS = 20
Fixed = tuple[tuple[int, ...], str]


def ending(suite: Suite, model: str, prompts: Prompts) -> str | None:
    """Return an instance that would end answers which are to go on; None where none would.

    Of a chat's prompts nobody but the server knows the ids, and what is sampled has no one end.
    """
    if prompts.path not in ("ids", "text") or not (prompts.ignore_eos and prompts.greedy):
        return None
    own = (i for i in suite.instances if i.model_name == model)
    return next((i.name for i in own if launcher_of(i.kind, i.args).can.ignore_eos == "none"), None)


def fix(night: Night, case: Case, n: int, launch: int) -> None:
    """Fix the first n prompts of a case in a launch, if any of it need that.

    Of the short requests of a warm-up any may end early. Raises ReferenceFailure when a text does
    not give back its ids, or no prompt was found that is answered at length.
    """
    results, prompts = night.results, night.suite.workload(case.workload).prompts
    who = ending(night.suite, case.model, prompts) if launch != PRIMING else None
    in_text = prompts.path in ("text", "chat")
    known = results.written.get((case.model, case.workload, launch))
    if not (in_text or who) or (known is not None and len(known.ids) >= n):
        return
    most = len(questions.drawn_for(results, case, n, launch))
    with ExitStack() as stack:
        fixing = Fixing(
            prompts,
            lambda again: questions.drawn_for(results, case, n, launch, again),
            f"texts/{prompts.name}/{night.suite.seed}/{launch}",
            prefix_groups(prompts.prefix, prompts.name, most, night.suite.seed),
            stack.enter_context(night.lab.writer(case.model)) if in_text else None,
            stack.enter_context(night.lab.reference(case.model)) if who else None,
            who,
        )
        begun_s, found = night.lab.clock(), []
        for number in range(most):
            what = "answering prompts, so that none ends early" if who else "writing prompts"
            night.say(f"{case.workload}: {what}, {number} of {most}")
            found.append(fixing.one(number))
        if who:
            took_s = night.lab.clock() - begun_s
            line = f"{case.workload}: {most} prompts that no answer ends early took the reference"
            night.screen.line(f"{line} {took_s:.0f} s, {fixing.early} were drawn anew for {who}")
        ids, texts = tuple(ids for ids, _ in found), tuple(text for _, text in found)
        begins = fixing.begins
    texts = texts if in_text else ()
    night.add(Written(case.model, case.workload, launch, ids, texts, begins))


@dataclass(slots=True)
class Fixing:
    """A workload's prompts in a launch, on their way to be fixed: one after the other.

    `draw(k)` gives all of them as they are drawn for the k-th time. A prompt depends on itself, on
    what it shares, and on what its conversation has said: fewer are a prefix of more. With a `pen`
    it is written, with a `reference` none is kept that ends early. `early` counts those that did.
    """

    prompts: Prompts
    draw: Callable[[int], Sequence[Request]]
    place: str
    groups: Sequence[int | None]
    pen: Writer | None = None
    reference: Reference | None = None
    who: str | None = None
    early: int = 0
    shared: dict[int, tuple[int, ...]] = field(default_factory=dict)
    before: Request | None = None

    @property
    def begins(self) -> tuple[int, ...]:
        """The ids that the model's tokenizer puts before a text by itself."""
        return self.pen.begins if self.pen is not None else ()

    def one(self, number: int) -> Fixed:
        """Return the ids of the next prompt, and its text where it is sent as one."""
        for again in range(MOST_DRAWS):
            request = self.draw(again)[number]
            ids, text = self._written(request, again)
            if self.reference is None or self._goes_on(self.reference, request, ids):
                return ids, text
            self.early += 1
        drawn = number + self.early
        raise ReferenceFailure(
            f"{self.early} of {drawn} prompts are answered with an end before output_tokens, and "
            f"{self.who} cannot go on past it; prompt {number} was drawn {MOST_DRAWS} times: write "
            "ignore_eos = false, or ask for fewer output_tokens"
        )

    def _goes_on(self, reference: Reference, request: Request, ids: tuple[int, ...]) -> bool:
        """Whether the reference answers at length; what comes next in a conversation follows it."""
        asked = Request(request.index, (*self.begins, *ids), request.max_tokens)
        if request.turn and self.before is not None:
            asked = continued(asked, self.before, ())
        most = request.max_tokens or 1
        if reference.ends(asked.prompt_token_ids, most):
            return False
        if self.prompts.turns > 1:
            made = reference.generate(replace(asked, ignore_eos=True), ())
            said = (*asked.prompt_token_ids, *made.output)
            self.before = replace(asked, prompt_token_ids=said)
        return True

    def _written(self, request: Request, again: int) -> Fixed:
        """Write a request, if it is to be: what prompts share as ids they share as text."""
        own, pen = request.prompt_token_ids, self.pen
        if pen is None:
            return own, ""
        prefix, group = self.prompts.prefix, self.groups[request.index]
        begins: tuple[int, ...] = ()
        if prefix is not None and group is not None and not request.turn:
            if group not in self.shared:
                place = f"{self.place}/prefix/{group}"
                self.shared[group], _ = pen.write(own[: prefix.tokens], (), place)
            begins = self.shared[group]
        place = f"{self.place}/{request.index}" + (f"/{again}" if again else "")
        ids, text = pen.write(own[len(begins) :], begins, place)
        if self.prompts.kind == "recall" and ids != own:
            raise ReferenceFailure(
                "recall prompts mean something as they are, and the model's tokenizer reads their "
                'text as other ids; write send = "ids"'
            )
        return ids, text


def fix_launch(night: Night, model: str) -> None:
    """Write the prompt that ends a launch's start as text, once a night."""
    if launch_key(model) in night.results.written:
        return
    prompt = questions.launch_prompt(night.results, model)
    with night.lab.writer(model) as pen:
        ids, text = pen.write(prompt, (), "texts/launch")
        night.add(Written(*launch_key(model), (ids,), (text,), pen.begins))


def begin_tokens(night: Night, case: Case, launch: int) -> int:
    """Return how many tokens the model's tokenizer puts before a text; 0 where none is sent."""
    known = night.results.written.get((case.model, case.workload, launch))
    return 0 if known is None else len(known.begins)
