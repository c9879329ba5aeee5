"""The keys of a workload that say what is sent: prompts, their lengths, how outputs are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from headway.lengths import (
    MIXTURES,
    Length,
    Lognormal,
    Part,
    Uniform,
    scaled,
    scaled_part,
    scaled_trace,
)
from headway.suite.bodies import read_bodies
from headway.suite.traces import read_trace
from headway.tables import Reader
from headway.workload import MIN_RECALL_TOKENS, Prefix, Prompts, Send, extremes

PROMPT_KINDS = ("uniform", "recall")
PROMPT_KEYS = (
    *("prompts", "prompt_tokens", "output_tokens", "mix", "replay", "scale", "prefix"),
    *("temperature", "top_p", "ignore_eos", "turns", "think_s", "send", "requests_file"),
)
# What a file of requests says for itself.
SAID_BY_BODIES = tuple(key for key in PROMPT_KEYS if key != "requests_file")


class PromptReader(Reader):
    """Reads what a workload sends."""

    def prompts(self, where: str, name: str, table: Mapping[str, Any]) -> Prompts:
        """Read the shape of a workload's requests."""
        if "requests_file" in table:
            return self._bodies(where, name, table)
        kind = self.get(where, table, "prompts", str, "uniform")
        self.choice(f"{where}.prompts", kind, PROMPT_KINDS)
        prompts = self._with_lengths(where, table, Prompts(name, None, None, kind=kind))
        temperature = self.at_least_0(where, table, "temperature", 0.0)
        top_p = self.positive(where, table, "top_p", float, 1.0, most=1.0)
        if top_p < 1 and not temperature:
            message = "means nothing without a temperature above 0: outputs are greedy"
            raise self.fail(f"{where}.top_p", message)
        prompts = replace(
            prompts,
            ignore_eos=self.get(where, table, "ignore_eos", bool, True),
            temperature=temperature,
            top_p=top_p,
            prefix=self._prefix(where, table),
            turns=self.positive(where, table, "turns", int, 1),
            think_s=self.at_least_0(where, table, "think_s", 0.0),
            send=self._send(where, table),
        )
        if prompts.think_s and prompts.turns == 1:
            raise self.fail(f"{where}.think_s", "needs turns: it passes between two of them")
        if prompts.turns > 1 and prompts.send == "text":
            message = "have no place in a plain text: send is 'text'; it must be 'chat' or 'ids'"
            raise self.fail(f"{where}.turns", message)
        if kind == "recall":
            shortest = min(prompt for prompt, _ in extremes(prompts, 0))
            for key, given in (
                ("prefix", prompts.prefix is not None),
                ("turns", prompts.turns > 1),
            ):
                if given:
                    raise self.fail(f"{where}.{key}", "cannot stand before recall prompts")
            if prompts.send == "chat":
                message = "is 'chat'; recall prompts mean something by themselves: 'ids' or 'text'"
                raise self.fail(f"{where}.send", message)
            if shortest < MIN_RECALL_TOKENS:
                fixed = isinstance(prompts.prompt_tokens, int)
                message = f"{'is' if fixed else 'has prompts of'} {shortest}; "
                message += f"recall prompts have at least {MIN_RECALL_TOKENS}"
                raise self.fail(f"{where}.{'prompt_tokens' if fixed else 'prompts'}", message)
        return prompts

    def _send(self, where: str, table: Mapping[str, Any]) -> Send:
        send: Send = self.get(where, table, "send", str, "ids")
        self.choice(f"{where}.send", send, get_args(Send))
        return send

    def _bodies(self, where: str, name: str, table: Mapping[str, Any]) -> Prompts:
        """Read the name of a file of requests, which say everything of themselves."""
        for key in SAID_BY_BODIES:
            if key in table:
                raise self.fail(f"{where}.{key}", "is for the lines of requests_file to say")
        file = self.get(where, table, "requests_file", str, "")
        bodies = read_bodies((Path(self.path).parent / file).absolute())
        return Prompts(name, None, None, ignore_eos=False, bodies=bodies)

    def _with_lengths(self, where: str, table: Mapping[str, Any], prompts: Prompts) -> Prompts:
        """Read the lengths from whichever keys say them."""
        scale = self.positive(where, table, "scale", float, 1.0)
        ways = [key for key in ("mix", "replay") if key in table]
        fixed = [key for key in ("prompt_tokens", "output_tokens") if key in table]
        if len(ways) > 1 or (ways and fixed):
            both = " and ".join([*ways, *fixed][:2])
            raise self.fail(where, f"has {both}: one of them says how long requests are")
        if "mix" in table:
            mix = self._mix(f"{where}.mix", table["mix"])
            return replace(prompts, mix=tuple(scaled_part(part, scale) for part in mix))
        if "replay" in table:
            file = self.get(where, table, "replay", str, "")
            trace = read_trace(Path(self.path).parent / file)
            return replace(prompts, trace=scaled_trace(trace, scale))
        return replace(
            prompts,
            prompt_tokens=scaled(self._length(where, table, "prompt_tokens", 128), scale),
            output_tokens=scaled(self._length(where, table, "output_tokens", 64), scale),
        )

    def _length(
        self, where: str, table: Mapping[str, Any], key: str, default: int | None
    ) -> Length:
        """Read a whole number, or a table of a law: {min, max} or {median, sigma, min, max}."""
        law = table.get(key)
        if not isinstance(law, dict):
            length: int | None = self.positive(where, table, key, int, default)
            if length is None:
                raise self.fail(f"{where}.{key}", "is missing")
            return length
        here = f"{where}.{key}"
        self.known(here, law, ("min", "max", "median", "sigma"))
        for needed in ("min", "max", *(("median", "sigma") if len(law) > 2 else ())):
            if needed not in law:
                laws = "{ min, max } or { median, sigma, min, max }"
                raise self.fail(f"{here}.{needed}", f"is missing; a length is a number, {laws}")
        low, high = (self.positive(here, law, end, int, None) for end in ("min", "max"))
        if low > high:
            raise self.fail(here, f"has min {low} above max {high}")
        if "median" not in law:
            return Uniform(low, high)
        median, sigma = (self.positive(here, law, k, float, None) for k in ("median", "sigma"))
        if not low <= median <= high:
            raise self.fail(f"{here}.median", f"is {median:g}; it must lie from {low} to {high}")
        return Lognormal(median, sigma, low, high)

    def _mix(self, where: str, mix: Any) -> tuple[Part, ...]:
        """Read a mixture: the name of one, or a list of tables."""
        if isinstance(mix, str):
            return MIXTURES[self.choice(where, mix, list(MIXTURES))]
        if not isinstance(mix, list) or not mix or not all(isinstance(p, dict) for p in mix):
            names = " or ".join(map(repr, MIXTURES))
            raise self.fail(where, f"is {mix!r}; it must be {names}, or a list of tables")
        parts = []
        for number, part in enumerate(mix):
            here = f"{where}[{number}]"
            self.known(here, part, ("prompt_tokens", "output_tokens", "share"))
            prompt, output = (
                self._length(here, part, key, None) for key in ("prompt_tokens", "output_tokens")
            )
            parts.append(Part(prompt, output, self.positive(here, part, "share", float, 1.0)))
        return tuple(parts)

    def _prefix(self, where: str, table: Mapping[str, Any]) -> Prefix | None:
        if "prefix" not in table:
            return None
        given, where = self.get(where, table, "prefix", dict, {}), f"{where}.prefix"
        self.known(where, given, ("tokens", "groups", "share"))
        tokens = self.positive(where, given, "tokens", int, None)
        if tokens is None:
            raise self.fail(f"{where}.tokens", "is missing")
        groups = self.positive(where, given, "groups", int, 1)
        return Prefix(tokens, groups, self.positive(where, given, "share", float, 1.0, most=1.0))
