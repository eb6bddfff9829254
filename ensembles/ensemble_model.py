"""An ensemble as a model: finds the models of its steps for each request, runs them, and counts.

Knows nothing of how models are served, but through the gateway's handles of them.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from ..core.errors import CharoniaError, InvalidArgument, NotReady
from ..core.gateway import Gateway, ModelHandle
from ..core.metrics import Reading
from ..core.model import ModelConfig, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import RequestContext
from ..core.statistics import VersionStatistics
from ..telemetry.model_metrics import FailureReason
from .ensemble_plan import EnsemblePlan, EnsembleStep, plan_ensemble, read_steps
from .ensemble_run import ENDPOINT, EnsembleRun, RequestTimes
from .readiness import AskedVersion, first_unready_reason
from .request_counts import RequestCounts
from .step_errors import with_model_name


class EnsembleModel:
    """One version of an ensemble. `quantiles`: of the latency summaries, empty for no summaries.

    Raises:
        InvalidArgument: the config's steps do not fit together.
    """

    def __init__(self, config: ModelConfig, gateway: Gateway, quantiles: Sequence[float] = ()) -> None:
        read_steps(config)
        self.config = config
        self._gateway = gateway
        self._counts = RequestCounts(config, quantiles)
        self._plan: EnsemblePlan | None = None

    async def load(self) -> None:
        """Check the steps against their models, which are loaded.

        Raises:
            CharoniaError: a model is not loaded, or does not fit.
        """
        self._plan = plan_ensemble(self.config, self._loaded_config)

    def _loaded_config(self, model: str, version: str) -> ModelConfig:
        try:
            return self._gateway.model_config(model, version)
        except CharoniaError as error:
            version = f"whose required version {version} is not loaded" if version else "which has no loaded version"
            message = f"ensemble '{self.config.name}' depends on '{model}' {version}: {error.message}"
            raise InvalidArgument(message, field="ensemble_scheduling") from None

    async def unload(self) -> None:
        self._plan = None

    def stats(self) -> ModelStats:
        """Ready while the models of all steps are."""
        plan = self._plan
        ready = plan is not None and all(self._gateway.is_model_ready(step.model, step.version) for step in plan.steps)
        return self._counts.stats(ready)

    async def unready_reason(self) -> str:
        """Why the model of a step says that it is not ready."""
        steps = () if self._plan is None else self._plan.steps
        return await first_unready_reason(self._gateway, (AskedVersion(step.model, step.version) for step in steps))

    def statistics(self) -> VersionStatistics:
        return self._counts.statistics()

    def count(self, context: RequestContext) -> None:
        self._counts.count(context)

    def readings(self) -> Iterator[Reading]:
        return self._counts.readings()

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        """Raises the error of the step that fails, with the ensemble's name before its text."""
        plan = self._plan
        if plan is None:
            raise NotReady(f"model '{self.config.name}' is not loaded")
        started_at, times, holder = time.monotonic_ns(), RequestTimes(), RequestContext(ENDPOINT)
        failure: FailureReason | None = FailureReason.CANCELED
        try:
            holder.counted = True  # it asks nothing, but holds the models until the end
            handles = {step.number: self._acquire(step, holder) for step in plan.steps}
            run = EnsembleRun(plan, request, context, handles, times)
            if len(plan.stages) == 1:
                response = await run.answer()
                failure = None
                yield response
            else:
                first = True
                async with aclosing(run.stream()) as responses:
                    async for response in responses:
                        if first:
                            self._counts.record_first_response(started_at)
                        first = False
                        yield response
            failure = None
        except Exception:
            failure = FailureReason.OTHER
            raise
        finally:
            holder.close()
            self._counts.record(request, context, [times.together()], started_at, failure)

    def _acquire(self, step: EnsembleStep, holder: RequestContext) -> ModelHandle:
        try:
            return self._gateway.acquire(holder, step.model, step.version)
        except CharoniaError as error:
            raise with_model_name(f"ensemble '{self.config.name}'", error) from None
