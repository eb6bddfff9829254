"""What a route costs: `python -m charonia.bench.routes`.

A request is opened, its model is looked up and asked, and the request is closed, which counts it, as endpoints do:
for a model, and for routes over two versions of it. What a route takes is the difference; the kinds take turns. Fields
are known before the lookup, as of OpenAI's bodies, or with the request, as in v2.
"""

import asyncio
from collections.abc import Mapping
from statistics import median
from time import process_time_ns
from typing import Any

from cyclopts import App
from rich.table import Table

from ..core.model import ModelConfig
from ..core.request import InferRequest
from ..core.request_context import RequestContext
from ..core.tensor import Tensor, TensorSpec
from ..repository.gateway import InProcessGateway
from ..repository.model_registry import LoadedModel
from ..routing.rollout import RolloutPlan, RolloutWatch
from ..routing.route import Route, RouteArm, RouteRule, RouteShadow, RouteTarget, StickyKey
from .command import Count, report_console, run_command

_TENSORS = (TensorSpec("A", "FP32", (-1,)),)
_INPUTS = {"A": Tensor.from_values("A", "FP32", [1.0])}
_PARAMETERS = {"user": "somebody", "metadata.tier": "gold"}
_BODY = {"model": "m", "user": "somebody", "metadata": {"tier": "gold"}}
_HEADERS = ((b"host", b"localhost"), (b"x-user", b"somebody"), (b"x-beta", b"yes"))
_PLAIN = "m"
_RARELY = 1e-9
"""What is told is what a request costs that is not copied."""

_ROLLOUT = "weights, in a rollout"

app = App(name="python -m charonia.bench.routes", help=__doc__)


class _Idle:
    """A model whose answers nobody reads."""

    def __init__(self, version: str) -> None:
        self.config = ModelConfig(_PLAIN, version, "idle", inputs=_TENSORS, outputs=_TENSORS)

    def infer(self, request: InferRequest, context: RequestContext) -> tuple[()]:
        return ()


def routed_gateway() -> tuple[InProcessGateway, Mapping[str, str]]:
    """A gateway with two versions of a model and routes over them; what is measured, by the name that is asked for."""
    gateway = InProcessGateway()
    models: list[Any] = [_Idle("1"), _Idle("2")]
    loaded = {each.config.version: LoadedModel(each, each.config) for each in models}
    gateway.registry.get_or_add(_PLAIN).publish(loaded)
    arms = RouteArm(_PLAIN, 1, 95), RouteArm(_PLAIN, 2, 5)
    to = RouteTarget(_PLAIN, 2)
    routes = {
        "weights": Route(arms),
        _ROLLOUT: Route(arms),
        "weights, and a shadow": Route(arms, shadow=RouteShadow(_PLAIN, 1, share=_RARELY)),
        "sticky by a header": Route(arms, StickyKey(header="x-user")),
        "a rule on a header": Route(arms, rules=(RouteRule(to=to, header="x-beta", equals="yes"),)),
        "sticky by a field": Route(arms, StickyKey(field="user")),
        "a rule on a field": Route(arms, rules=(RouteRule(to=to, field="metadata.tier", equals="gold"),)),
    }
    gateway.routes.replace(routes)
    plan = RolloutPlan(to=to, guard="error_rate < 1 %, p99 < 1.2x")
    gateway.routes.served[_ROLLOUT].watch = RolloutWatch(plan, 0, 0.0)
    return gateway, {_PLAIN: "a model", **{name: f"a route: {name}" for name in routes}}


async def request_microseconds(gateway: InProcessGateway, name: str, requests: int, body: bool) -> float:
    """Of CPU, a request; with a `body` that was parsed before, or with parameters."""
    asked, began = InferRequest(inputs=_INPUTS, parameters=_PARAMETERS), process_time_ns()
    for _ in range(requests):
        with gateway.open_request("bench", _HEADERS) as context:
            context.body = _BODY if body else None
            (await gateway.acquire(context, name)).infer(asked)
            context.finish()
    return (process_time_ns() - began) / requests / 1e3


@app.default
def main(requests: Count = 20_000, turns: Count = 9) -> None:
    """Print what each kind takes, and over a model.

    Parameters
    ----------
    requests
        In each turn.
    turns
        Of which the median counts.
    """
    gateway, names = routed_gateway()
    found: dict[tuple[str, bool], list[float]] = {(name, body): [] for body in (True, False) for name in names}
    for _ in range(turns):
        for (name, body), times in found.items():
            times.append(asyncio.run(request_microseconds(gateway, name, requests, body)))
    table = Table("asked for", "by", "us of CPU", "over a model")
    for (name, body), times in found.items():
        over = [time - model for time, model in zip(times, found[_PLAIN, body], strict=True)]
        told = "" if name == _PLAIN else f"{median(over):.2f}"
        table.add_row(names[name], "a parsed body" if body else "v2", f"{median(times):.2f}", told)
    report_console().print(table)


if __name__ == "__main__":
    run_command(app)
