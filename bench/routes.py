"""What a route costs: `python -m charonia.bench.routes`.

A request is opened, its model is looked up, and the request is closed, which lets it go, as endpoints do: for a
model, and for routes over two versions of it. What a route takes is the difference; the kinds take turns.
"""

import asyncio
from collections.abc import Mapping
from statistics import median
from time import process_time_ns
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table

from ..core.model import ModelConfig
from ..core.tensor import TensorSpec
from ..repository.gateway import InProcessGateway
from ..repository.model_registry import LoadedModel
from ..routing.route import Route, RouteArm, RouteRule, RouteTarget, StickyKey
from .command import Count, run_command

_TENSORS = (TensorSpec("A", "FP32", (-1,)),)
_HEADERS = ((b"host", b"localhost"), (b"x-user", b"somebody"), (b"x-beta", b"yes"))
_PLAIN = "m"

app = App(name="python -m charonia.bench.routes", help=__doc__)


class _Idle:
    """A model that nobody asks."""

    def __init__(self, version: str) -> None:
        self.config = ModelConfig(_PLAIN, version, "idle", inputs=_TENSORS, outputs=_TENSORS)


def routed_gateway() -> tuple[InProcessGateway, Mapping[str, str]]:
    """A gateway with two versions of a model and routes over them; what is measured, by the name that is asked for."""
    gateway, kinds = InProcessGateway(), {"weights": None, "sticky": StickyKey(header="x-user"), "a rule": None}
    models: list[Any] = [_Idle("1"), _Idle("2")]
    loaded = {each.config.version: LoadedModel(each, each.config) for each in models}
    gateway.registry.get_or_add(_PLAIN).publish(loaded)
    arms = RouteArm(_PLAIN, 1, 95), RouteArm(_PLAIN, 2, 5)
    rule = RouteRule(to=RouteTarget(_PLAIN, 2), header="x-beta", equals="yes")
    routes = {kind: Route(arms, sticky, (rule,) if kind == "a rule" else ()) for kind, sticky in kinds.items()}
    gateway.routes.replace(routes)
    return gateway, {_PLAIN: "a model", **dict.fromkeys(routes, "")}


async def lookup_microseconds(gateway: InProcessGateway, name: str, requests: int) -> float:
    """Of CPU, a request."""
    began = process_time_ns()
    for _ in range(requests):
        with gateway.open_request("bench", _HEADERS) as context:
            await gateway.acquire(context, name)
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
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name, times in found.items():
            times.append(asyncio.run(lookup_microseconds(gateway, name, requests)))
    table = Table("asked for", "us of CPU", "over a model")
    for name, times in found.items():
        over = [time - model for time, model in zip(times, found[_PLAIN], strict=True)]
        table.add_row(
            names[name] or f"a route: {name}", f"{median(times):.2f}", f"{median(over):.2f}" if over[0] else ""
        )
    Console().print(table)


if __name__ == "__main__":
    run_command(app)
