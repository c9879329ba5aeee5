"""What a night asked of its engines, made again from its suite: prompts are drawn, never stored.

But for those that had to be fixed before they were sent (`Results.written`).
"""

from __future__ import annotations

import functools
from dataclasses import replace

from headway import metrics
from headway.core import Case, LaunchRecord, Request, Run
from headway.engines.servers import launcher_of
from headway.results import Results, Written, launch_key
from headway.suite.bodies import requests_in
from headway.workload import Vocabulary, in_text, make_requests

# Judging asks for the same prompts many times, and they are a pure function.
_made = functools.lru_cache(maxsize=32)(make_requests)


def requests_for(results: Results, case: Case, n: int, launch: int) -> tuple[Request, ...]:
    """Return the first n requests of a case in a launch: prompts are made anew, never stored.

    Except for those that had to be fixed before it (`Results.written`): texts, and ids that an
    engine does not answer with an early end.
    """
    workload = results.suite.workload(case.workload)
    if workload.prompts.bodies is not None:
        held = requests_in(workload.prompts.bodies)
        return tuple(replace(held[k % len(held)], index=k) for k in range(n))
    drawn = drawn_for(results, case, n, launch)[:n]
    send, key = workload.prompts.send, (case.model, workload.name, launch)
    if send == "ids":
        fixed = results.written[key].ids if key in results.written else ()
        chosen = (
            replace(one, prompt_token_ids=ids) for one, ids in zip(drawn, fixed, strict=False)
        )
        return tuple(chosen) if fixed else drawn
    as_text = results.written[key]
    written = zip(drawn, as_text.ids, as_text.texts, strict=False)
    return tuple(in_text(one, ids, text, send) for one, ids, text in written)


def drawn_for(
    results: Results, case: Case, n: int, launch: int, again: int = 0
) -> tuple[Request, ...]:
    """Return requests as they are drawn (or drawn `again`, so many times), at least n.

    As many as the workload's largest level has, so that all levels share what is made here.
    """
    workload = results.suite.workload(case.workload)
    most = max(n, *(level.num_requests for level in workload.levels))
    vocabulary = _vocabulary(results, case.model)
    return _made(workload.prompts, most, launch, results.suite.seed, vocabulary, again)


def _vocabulary(results: Results, model: str) -> Vocabulary:
    facts = results.models[model]
    return Vocabulary(facts.vocab_size, facts.special_ids)


def requests_of(results: Results, run: Run) -> tuple[Request, ...]:
    """Make a Run's requests again, as the engine read them.

    A text is read with what the model's tokenizer puts before it, where the server's counts say so.
    """
    requests = requests_for(results, run.case, run.level.num_requests, run.launch)
    begins = _begins(results.written.get((run.case.model, run.case.workload, run.launch)), run)
    if not begins:
        return requests
    return tuple(
        replace(one, prompt_token_ids=(*begins, *one.prompt_token_ids)) for one in requests
    )


def _begins(written: Written | None, run: Run) -> tuple[int, ...]:
    read = written is not None and run.prompt_path == "text" and metrics.tokens_added(run)
    return written.begins if written is not None and read else ()


def launch_prompt(results: Results, model: str) -> tuple[int, ...]:
    """Return the short prompt whose answer ends a launch's start."""
    return _launch_prompt(_vocabulary(results, model))


@functools.lru_cache(maxsize=8)
def _launch_prompt(vocabulary: Vocabulary) -> tuple[int, ...]:
    ids = vocabulary.ordinary_ids()
    return tuple(ids[(7 * k + 3) % len(ids)] for k in range(8))


def takes_ids(results: Results, instance: str) -> bool:
    """Whether an instance's kind takes token ids as a prompt."""
    asked = results.suite.instance(instance)
    return launcher_of(asked.kind, asked.args).can.ids_in


def launch_request(results: Results, instance: str) -> Request:
    """Return the request whose answer ends a launch's start; a text must have been written."""
    model = results.suite.instance(instance).model_name
    request = Request(0, launch_prompt(results, model), 1)
    if takes_ids(results, instance):
        return request
    written = results.written[launch_key(model)]
    return in_text(request, written.ids[0], written.texts[0], "text")


def launch_prompt_read(results: Results, launch: LaunchRecord) -> tuple[int, ...]:
    """Return the ids of the prompt that a launch's first token answers; empty where unknown."""
    model = results.suite.instance(launch.instance).model_name
    if takes_ids(results, launch.instance):
        prompt = launch_prompt(results, model)
        return prompt if launch.first_prompt_tokens in (None, len(prompt)) else ()
    written = results.written.get(launch_key(model))
    readings = [] if written is None else [written.ids[0], (*written.begins, *written.ids[0])]
    fitting = (ids for ids in readings if len(ids) == launch.first_prompt_tokens)
    return next(fitting, ())
