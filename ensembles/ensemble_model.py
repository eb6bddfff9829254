"""An ensemble: finds the models of its steps for each request, and runs them.

Knows nothing of how models are served, but through the gateway's handles of them.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..core.errors import CharoniaError, InvalidArgument
from ..core.gateway import Gateway, ModelHandle
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse
from ..core.request_context import RequestContext
from .composite_model import AskedVersion, RequestTimes
from .ensemble_plan import EnsemblePlan, EnsembleStep, plan_ensemble, read_steps
from .ensemble_run import ENDPOINT, EnsembleRun
from .step_errors import with_model_name


class Ensemble:
    """One version of an ensemble.

    Raises:
        InvalidArgument: the config's steps do not fit together.
    """

    def __init__(self, config: ModelConfig, gateway: Gateway) -> None:
        read_steps(config)
        self._config = config
        self._gateway = gateway
        self._plan: EnsemblePlan | None = None

    async def load(self) -> None:
        """Check the steps against their models, which are loaded.

        Raises:
            CharoniaError: a model is not loaded, or does not fit.
        """
        self._plan = plan_ensemble(self._config, self._loaded_config)

    def _loaded_config(self, model: str, version: str) -> ModelConfig:
        try:
            return self._gateway.model_config(model, version)
        except CharoniaError as error:
            version = f"whose required version {version} is not loaded" if version else "which has no loaded version"
            message = f"ensemble '{self._config.name}' depends on '{model}' {version}: {error.message}"
            raise InvalidArgument(message, field="ensemble_scheduling") from None

    async def unload(self) -> None:
        self._plan = None

    @property
    def asked(self) -> list[AskedVersion]:
        return [] if self._plan is None else [AskedVersion(step.model, step.version) for step in self._plan.steps]

    async def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """Raises the error of the step that fails, with the ensemble's name before its text."""
        plan, holder = self._plan, RequestContext(ENDPOINT)
        assert plan is not None
        holder.counted = True  # it asks nothing, but holds the models until the end
        with holder:
            handles = {step.number: self._acquire(step, holder) for step in plan.steps}
            run = EnsembleRun(plan, request, context, handles, times)
            if len(plan.stages) == 1:
                yield await run.answer()
            else:
                async with aclosing(run.stream()) as responses:
                    async for response in responses:
                        yield response

    def _acquire(self, step: EnsembleStep, holder: RequestContext) -> ModelHandle:
        try:
            return self._gateway.acquire(holder, step.model, step.version)
        except CharoniaError as error:
            raise with_model_name(f"ensemble '{self._config.name}'", error) from None
