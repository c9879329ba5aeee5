"""Which of a suite's optional engines can be had on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from headway import environment, suite
from headway.engines.servers import LAUNCHERS, launcher_of
from headway.environment import EnvironmentFailed
from headway.suite import Instance, Suite, SuiteError

Say = Callable[[str], object]


def available(loaded: Suite, wanted: Collection[str], home: Path, say: Say) -> Suite:
    """Return a suite without the optional engines that cannot be had here.

    An engine of no kind that there is cannot be had anywhere: SuiteError, optional or not.

    The environments of those that are `wanted` are made if need be, which says what it takes; of
    the others it is only asked whether they could be. Raises SuiteError where no engine is left.
    """
    kinds = sorted({*environment.kinds(), *LAUNCHERS})
    for instance in loaded.instances:
        if ":" not in instance.kind and instance.kind not in kinds:
            raise SuiteError(
                f"{loaded.path}: engine.{instance.name}.kind is {instance.kind!r}; allowed: "
                f"{', '.join(kinds)}, or package.module:Class for an engine of your own"
            )
    left_out = {}
    for instance in loaded.instances:
        if instance.optional:
            try:
                _look_for(instance, home, say, make=instance.name in wanted)
            except EnvironmentFailed as error:
                left_out[instance.name] = str(error).partition("\n")[0]
    return suite.without(loaded, left_out)


def _look_for(instance: Instance, home: Path, say: Say, *, make: bool) -> None:
    if instance.image or launcher_of(instance.kind, instance.args).environment == "none":
        return  # what it runs in is not for us to make, nor to be seen from here
    if instance.python is not None:
        if shutil.which(instance.python) is None:
            raise EnvironmentFailed(f"its python {instance.python} is not there")
        return
    if instance.source or ":" in instance.kind:
        return
    needed = environment.environment_of(instance.kind)
    if needed.own:
        return
    planned = environment.plan(needed, home)
    if make:
        environment.make([planned], home, say)
