"""A pipeline as a model: `pipeline.py` of its version's directory, run in the server's own event loop.

Its code is trusted as the server's own is: nothing keeps it from holding the event loop, or from reading memory.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

from ..core.declared_models import MODELS_PARAMETER, DeclaredModels
from ..core.errors import CharoniaError, InvalidArgument
from ..core.gateway import Gateway
from ..core.metrics import Reading
from ..core.model import ModelConfig, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import RequestContext
from ..core.statistics import VersionStatistics
from ..telemetry.model_metrics import FailureReason
from .lookup import ModelRequests
from .pipeline_code import PipelineCode
from .pipeline_run import PipelineRun
from .readiness import AskedVersion, first_unready_reason
from .request_counts import RequestCounts

log = logging.getLogger(__name__)


class PipelineModel:
    """One version of a pipeline. `quantiles`: of the latency summaries, empty for no summaries.

    Raises:
        InvalidArgument: its config or its file is no pipeline's; the message says where.
    """

    def __init__(self, config: ModelConfig, directory: Path, gateway: Gateway, quantiles: Sequence[float] = ()) -> None:
        if not config.inputs or not config.outputs:
            side = "input" if not config.inputs else "output"
            raise InvalidArgument(f"pipeline '{config.name}' must declare at least one {side}", field=side)
        self.config = config
        self._declared = DeclaredModels.of(config.parameters)
        if config.name in self._declared.names:
            raise InvalidArgument(f"pipeline '{config.name}' asks itself", field=MODELS_PARAMETER)
        self._gateway = gateway
        self._code = PipelineCode(directory, config)
        self._counts = RequestCounts(config, quantiles)
        self._loaded = False

    async def load(self) -> None:
        """Import the code, and call its `load`.

        Raises:
            InvalidArgument: a model that it needs is not loaded, or the code failed; the message names file and line.
        """
        for model in sorted(self._declared.required):
            try:
                self._gateway.model_config(model)
            except CharoniaError as error:
                message = f"pipeline '{self.config.name}' depends on '{model}' which has no loaded version"
                raise InvalidArgument(f"{message}: {error.message}", field=MODELS_PARAMETER) from None
        await asyncio.to_thread(self._code.load)
        try:
            await self._call("load", self.config)
        except BaseException:
            self._code.unload()
            raise
        self._loaded = True

    async def unload(self) -> None:
        """Call the code's `unload`, and forget the code."""
        self._loaded = False
        try:
            await self._call("unload")
        except InvalidArgument as error:
            log.error("%s", error.message)
        finally:
            self._code.unload()

    async def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the code if there is one: a plain one in a thread, for that may take its time."""
        function = self._code.function(name)
        if function is None:
            return
        try:
            if inspect.iscoroutinefunction(function):
                await function(*arguments)
            else:
                await asyncio.to_thread(function, *arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.error("'%s' of pipeline '%s' has failed", name, self.config.name, exc_info=error)
            message = f"'{name}' of pipeline '{self.config.name}' has failed{self._code.where(error)}"
            raise InvalidArgument(f"{message}: {type(error).__name__}: {error}") from None

    def stats(self) -> ModelStats:
        """Ready while the models that it needs are."""
        return self._counts.stats(self._loaded and all(map(self._gateway.is_model_ready, self._declared.required)))

    async def unready_reason(self) -> str:
        """Why a model that it needs says that it is not ready."""
        return await first_unready_reason(self._gateway, map(AskedVersion, self._declared.required))

    def statistics(self) -> VersionStatistics:
        return self._counts.statistics()

    def count(self, context: RequestContext) -> None:
        self._counts.count(context)

    def readings(self) -> Iterator[Reading]:
        return self._counts.readings()

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        """Raises what the code raises."""
        started_at = time.monotonic_ns()
        requests = ModelRequests(self.config.name, self._declared, self._gateway, request, context)
        failure: FailureReason | None = FailureReason.CANCELED
        first = True
        try:
            async with aclosing(PipelineRun(self.config, self._code, request, requests).stream()) as responses:
                async for response in responses:
                    if first:
                        self._counts.record_first_response(started_at)
                    first = False
                    failure = None if response.final else failure
                    yield response
            failure = None
        except Exception:
            failure = FailureReason.OTHER
            raise
        finally:
            self._counts.record(request, context, [requests.times.together()], started_at, failure)
