"""What an endpoint understands, asked of it after it is ready and before its first Run.

Its documentation is where this starts; what does not hold is not sent any more, and what is taken
without a word and without effect becomes a notice, one sentence each. A probe request that fails
is an answer. There are at most nine, of a few tokens each.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway import loadgen, sse
from headway.core import Capabilities, Request
from headway.engines.endpoint import ENDING_S, Endpoint
from headway.engines.launcher import LaunchError
from headway.loadgen import Recipient
from headway.night.found import Answer, Draft, Found, named_in, optional, pins, shown, without
from headway.transport import Exchange, HttpTransport, Target

MOST_REQUESTS = 9
ANSWER_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 120.0
# Enough tokens for a penalty on repeating to show.
TOKENS = 8
# Longer than two blocks of any server's prefix cache (vLLM's on a CPU hold 128 tokens).
LONG_TOKENS = 288
# More than any two logits lie apart, and as much as OpenAI's API allows.
BIAS = 100
MADE_UP = "headway_made_up_field"

Ask = Callable[[Request, Recipient], Awaitable[Answer]]


async def ask(
    request: Request, recipient: Recipient, timeout_s: float = ANSWER_TIMEOUT_S
) -> Answer:
    """Send one request and return what came; whatever the server does is an answer."""
    exchange = Exchange()
    http = HttpTransport(recipient.target, idle_timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await http.send(loadgen.payload(request, recipient), exchange)
    except TimeoutError:
        return Answer(None, said=f"no answer within {timeout_s:g} s")
    finally:
        await http.close()
    body = bytes(exchange.body.data[:4000]).decode("utf-8", "replace")
    if exchange.error is not None or exchange.status != 200:
        return Answer(exchange.status, said=exchange.error.message if exchange.error else body)
    stream = sse.parse(exchange.body)
    said = stream.error.message if stream.error else body
    return Answer(200, stream, _has_logprobs(exchange), said)


def _has_logprobs(exchange: Exchange) -> bool:
    for _, data in sse.events(exchange.body):
        try:
            choices = json.loads(data).get("choices")
            found = bool(choices and choices[0].get("logprobs"))
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
            continue
        if found:
            return True
    return False


def recipient_of(endpoint: Endpoint, can: Capabilities, salt: str | None = None) -> Recipient:
    """Return whom requests are for, and what is understood there."""
    target = Target.parse(endpoint.base_url)
    return Recipient(target, endpoint.served_name, can, endpoint.spec.api_key, salt)


async def first_output(endpoint: Endpoint, request: Request) -> Answer:
    """Ask for one token, as documented: an engine that gives none is not up (LaunchError).

    Asked again without any field that is not needed, where one of them may have been refused.
    """
    can, spec = endpoint.launcher.can, endpoint.spec
    answer = await ask(request, recipient_of(endpoint, can), spec.start_timeout_s)
    if answer.refused and optional(can):
        bare = recipient_of(endpoint, without(can, optional(can)))
        plain = await ask(request, bare, spec.start_timeout_s)
        answer = plain if plain.good else answer
    if not answer.good:
        status = "" if answer.status is None else f"status {answer.status} "
        cause = f"{status}{shown(answer.said)}"
        raise LaunchError("no_token", f"{spec.instance} gave no first token: {cause}")
    return answer


async def probed(
    endpoint: Endpoint, request: Request, sizes: Sequence[tuple[int, int]] = ()
) -> Found:
    """Probe an endpoint within the (prompt, output) lengths that its workloads have at most.

    Raises LaunchError when it ends meanwhile.
    """

    async def ask_living(request: Request, recipient: Recipient) -> Answer:
        answer = await ask(request, recipient)
        if not answer.good and endpoint.ends_within(ENDING_S if answer.status is None else 0.0):
            raise endpoint.died("while it was probed")
        return answer

    length = min(LONG_TOKENS, max((prompt for prompt, _ in sizes), default=0))
    tokens = min(TOKENS, max((output for _, output in sizes), default=TOKENS))
    eos_ids = endpoint.spec.model.get("eos_ids", ())
    recipient = recipient_of(endpoint, endpoint.launcher.can)
    return await probe(recipient, replace(request, max_tokens=tokens), eos_ids, length, ask_living)


async def probe(
    recipient: Recipient, request: Request, eos_ids: Sequence[int], length: int = 0, ask: Ask = ask
) -> Found:
    """Ask an endpoint what it understands, beginning with what `recipient.can` says.

    `request` is a short greedy one; its prompt is repeated up to `length` tokens where the prefix
    cache matters. `eos_ids` are the model's end marks. What `ask` raises ends the probe.
    """
    until_s = time.monotonic() + PROBE_TIMEOUT_S
    # New ones each time: a server that runs on may remember what an earlier probe sent.
    salt = os.urandom(6).hex()
    made = _Probe(replace(recipient, salt=salt), request, eos_ids, ask, until_s)
    made.draft.can = recipient.can
    await made.all(_repeated(request, length))
    return made.draft.found()


def _repeated(request: Request, length: int) -> Request:
    times = max(1, length // max(1, len(request.prompt_token_ids)))
    texts = tuple(text * times for text in request.texts)
    return replace(request, prompt_token_ids=request.prompt_token_ids * times, texts=texts)


@dataclass(slots=True)
class _Probe:
    """The questions in their order. Later ones leave out what earlier ones found useless."""

    recipient: Recipient
    short: Request
    eos_ids: Sequence[int]
    ask: Ask
    until_s: float
    left: int = MOST_REQUESTS
    draft: Draft = field(default_factory=lambda: Draft(Capabilities()))

    async def all(self, long: Request) -> None:
        """Ask everything."""
        plain = await self._settled(long)
        if not plain.good:
            self.draft.notices.append(f"it did not answer the probe: {shown(plain.said)}")
            return
        self.draft.read(long, plain)
        await self._defaults(long, plain)
        await self._strict_fields()
        await self._logprobs()
        await self._end_mark(plain)
        await self._salt(long)

    async def _send(
        self, request: Request, can: Capabilities | None = None, salt: str = "", **more: Any
    ) -> Answer:
        """Send one request with `more` fields (and more `salt`), unless there were enough."""
        if self.left == 0 or time.monotonic() > self.until_s:
            return Answer(None, said="the probe was over before it was asked")
        self.left -= 1
        can = can or self.draft.can
        can = replace(can, fields={**can.fields, **more})
        salt = f"{self.recipient.salt}{salt}"
        return await self.ask(request, replace(self.recipient, can=can, salt=salt))

    async def _settled(self, request: Request) -> Answer:
        """Leave out the fields that are refused; return the answer to those that are not."""
        answer = await self._send(request)
        while answer.refused:
            named = named_in(answer.said, optional(self.draft.can))
            if not named:
                return await self._one_by_one(request, answer)
            self.draft.refused(named, answer)
            answer = await self._send(request)
        return answer

    async def _one_by_one(self, request: Request, refusal: Answer) -> Answer:
        """Begin without any field that is not needed, and keep each that does not spoil it."""
        wanted = self.draft.can
        can = without(wanted, optional(wanted))
        best = await self._send(request, can)
        if not best.good:
            return refusal
        pinned = list(pins(wanted.fields))
        groups = [[name] for name in optional(wanted) if name not in pinned]
        groups += [pinned] if pinned else []
        left_out = list(optional(wanted))
        for group in groups:
            others = [name for name in left_out if name not in group]
            answer = await self._send(request, without(wanted, others))
            if answer.good:
                left_out, best = others, answer
            else:
                self.draft.refused(group, answer)
        self.draft.can = without(wanted, left_out)
        return best

    async def _defaults(self, request: Request, plain: Answer) -> None:
        """Ask the same without the pinned fields: what would the defaults have done?"""
        pinned = pins(self.draft.can.fields)
        if not pinned:
            return
        bare = await self._send(request, without(self.draft.can, pinned))
        self.draft.read_cached(bare)
        if not bare.good or bare.output == plain.output:
            return
        # The prefix cache was cold for the first answer, and may alone have changed the second.
        again = await self._send(request)
        if again.good and again.output != bare.output:
            self.draft.notices.append(
                "its own or its model's defaults would change greedy output: without "
                f"{', '.join(pinned)} the same request is answered otherwise"
            )

    async def _strict_fields(self) -> None:
        made_up: dict[str, Any] = {MADE_UP: True}
        answer = await self._send(replace(self.short, max_tokens=1), **made_up)
        if not answer.good and not answer.refused:
            return
        if answer.refused != self.draft.can.strict_fields:
            does = "is refused" if answer.refused else "is ignored without a word"
            said = f"a field that it does not know {does}, which is not documented"
            self.draft.notices.append(said)
        self.draft.can = replace(self.draft.can, strict_fields=answer.refused)

    async def _logprobs(self) -> None:
        answer = await self._send(replace(self.short, max_tokens=1), logprobs=1)
        if not answer.good and not answer.refused:
            return
        if self.draft.can.logprobs and not answer.logprobs:
            self.draft.notices.append("no logprobs come, though it is documented to give them")
        self.draft.can = replace(self.draft.can, logprobs=answer.logprobs)

    async def _end_mark(self, plain: Answer) -> None:
        """Force the end mark: is it emitted, or banned, or the end after all?"""
        documented = self.draft.can.ignore_eos
        if documented == "none" or not self.eos_ids:
            return
        reason = await self._bias_is_useless(plain)
        if reason is None:
            eos_id = self.eos_ids[0]
            forced = await self._send(self.short, logit_bias={str(eos_id): BIAS})
            reason = self.draft.read_end_mark(forced, eos_id, self.short.max_tokens or 0)
        if reason is not None:
            self.draft.notices.append(
                f"that ignore_eos {documented}s the end mark is documented, not proven: {reason}"
            )

    async def _bias_is_useless(self, plain: Answer) -> str | None:
        """Force an ordinary token; return why logit_bias proves nothing, or None."""
        if plain.ids is None:
            return "the end mark cannot be seen without token ids"
        first = plain.ids[0]
        other = next((i for i in self.short.prompt_token_ids if i != first), None)
        if other is None:
            return "no other token is known that could be forced"
        one = replace(self.short, max_tokens=1)
        answer = await self._send(one, logit_bias={str(other): BIAS})
        if not answer.good:
            return f"logit_bias is answered with {shown(answer.said)}"
        return None if answer.ids == (other,) else "logit_bias has no effect here"

    async def _salt(self, request: Request) -> None:
        """Ask with another salt what was asked before: nothing may be found in the cache."""
        salt = self.draft.can.salt
        if salt is None:
            return
        answer = await self._send(replace(request, max_tokens=1), salt="-other")
        self.draft.read_cached(answer)
        cached = answer.stream.cached_prompt_tokens
        if cached:
            self.draft.useless([salt], f"{cached} prompt tokens were cached under another one")
