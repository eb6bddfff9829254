"""A pipeline: `pipeline.py` of its version's directory, run in the server's own event loop.

Its code is trusted as the server's own is: nothing keeps it from holding the event loop, or from reading memory.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from ..core.declared_models import MODELS_PARAMETER, DeclaredModels
from ..core.errors import CharoniaError, InvalidArgument
from ..core.gateway import Gateway
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse
from ..core.request_context import RequestContext
from .composite_model import AskedVersion, RequestTimes
from .lookup import ModelRequests
from .pipeline_code import PipelineCode
from .pipeline_run import PipelineRun

log = logging.getLogger(__name__)


class Pipeline:
    """One version of a pipeline.

    Raises:
        InvalidArgument: its config or its file is no pipeline's; the message says where.
    """

    def __init__(self, config: ModelConfig, gateway: Gateway, directory: Path) -> None:
        if not config.inputs or not config.outputs:
            side = "input" if not config.inputs else "output"
            raise InvalidArgument(f"pipeline '{config.name}' must declare at least one {side}", field=side)
        self._config = config
        self._declared = DeclaredModels.of(config.parameters)
        if config.name in self._declared.names:
            raise InvalidArgument(f"pipeline '{config.name}' asks itself", field=MODELS_PARAMETER)
        self._gateway = gateway
        self._code = PipelineCode(directory, config)

    async def load(self) -> None:
        """Import the code, and call its `load`.

        Raises:
            InvalidArgument: a model that it needs is not loaded, or the code failed; the message names file and line.
        """
        for model in sorted(self._declared.required):
            try:
                self._gateway.model_config(model)
            except CharoniaError as error:
                message = f"pipeline '{self._config.name}' depends on '{model}' which has no loaded version"
                raise InvalidArgument(f"{message}: {error.message}", field=MODELS_PARAMETER) from None
        await asyncio.to_thread(self._code.load)
        try:
            await self._call("load", self._config)
        except BaseException:
            self._code.unload()
            raise

    async def unload(self) -> None:
        """Call the code's `unload`, and forget the code."""
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
            log.error("'%s' of pipeline '%s' has failed", name, self._config.name, exc_info=error)
            message = f"'{name}' of pipeline '{self._config.name}' has failed{self._code.where(error)}"
            raise InvalidArgument(f"{message}: {type(error).__name__}: {error}") from None

    @property
    def asked(self) -> list[AskedVersion]:
        return [AskedVersion(model) for model in self._declared.required]

    async def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """Raises what the code raises."""
        requests = ModelRequests(self._config.name, self._declared, self._gateway, request, context, times)
        async with aclosing(PipelineRun(self._config, self._code, request, requests).stream()) as responses:
            async for response in responses:
                yield response
