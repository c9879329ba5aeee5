"""AsyncLLM: what vLLM's own server is made of, without its HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

import vllm.exceptions
from vllm import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from headway.core import EngineInfo
from headway.engines.contract import Output, Submission
from headway.engines.models.folder import ModelFolder
from headway.engines.vllm import asking

KIND = "vllm"
# How often an idle engine is looked at: its process may die without a word.
HEALTH_PERIOD_S = 0.5
STOP_S = 3.0
# What a request is refused with; older versions raised ValueError only.
REFUSED: type[Exception] = getattr(vllm.exceptions, "VLLMClientError", ValueError)


class Vllm:
    """Implements `contract.AsyncEngine`. Arguments are those of vLLM's AsyncEngineArgs."""

    def __init__(self, folder: ModelFolder, dtype: str, device: str, **args: object) -> None:
        self._args = asking.arguments(KIND, AsyncEngineArgs, folder, dtype, args)
        self._eos_ids = folder.eos_ids
        self._llm: AsyncLLM | None = None

    async def start(self) -> EngineInfo:
        """Load the model, in a process of vLLM's own."""
        self._llm = AsyncLLM.from_engine_args(self._args)
        return asking.describe(KIND, self._llm.vllm_config, {})

    async def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        """Yield tokens as they leave vLLM's stream; several at once when we come late to it."""
        assert self._llm is not None
        params = asking.sampling(submission, self._eos_ids, RequestOutputKind.DELTA)
        stream = self._llm.generate(asking.prompt(submission), params, str(submission.id))
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for said in outputs:
                    yield asking.output(submission.id, said)
        except REFUSED as error:
            raise ValueError(str(error)) from error

    async def ended(self) -> str:
        """Return that vLLM's own process has died; its log says why."""
        assert self._llm is not None
        while not self._llm.errored:
            await asyncio.sleep(HEALTH_PERIOD_S)
        return f"vLLM has ended: {self._llm.dead_error}"

    async def stats(self) -> Mapping[str, float]:
        """Return what vLLM's own /metrics would say."""
        return asking.stats()

    async def close(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(STOP_S)  # nothing else is left to do in this loop
