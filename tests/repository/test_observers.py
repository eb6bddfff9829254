"""Observers of requests: what they are told of routes, requests and their ends, and models that they may ask."""

from collections.abc import Container, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import pytest

from charonia.core.errors import NotFound
from charonia.core.extension_contracts import Item, RouteObserver
from charonia.core.gateway import ResponseStream
from charonia.core.metrics import Measurement, Reading
from charonia.core.request import GenerateRequest, InferRequest
from charonia.core.request_context import RequestContext

from .test_gateway import A
from .test_routes import Numbered, gateway_with, shares, version_that_answers


class Diary:
    """Notes what it is told; follows the route `r` alone."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def observe_route(self, name: str, route: Mapping[str, Any]) -> RouteObserver | None:
        self.notes.append(f"route {name} of {len(route['arms'])}")
        return self if name == "r" else None

    def follow(
        self, request: InferRequest | GenerateRequest, context: RequestContext, responses: ResponseStream[Item]
    ) -> ResponseStream[Item]:
        self.notes.append(f"asks {context.route}")
        return responses

    def forget_others(self, routes: Container[str]) -> None:
        self.notes.append(f"keeps r: {'r' in routes}")

    def measure(self) -> Iterator[Measurement]:
        yield Measurement({}, (Reading("notes", len(self.notes)),))

    def close(self) -> None:
        self.notes.append("closes")


async def test_an_observer_is_told_of_routes_and_follows_their_requests() -> None:
    gateway, diary = gateway_with(Numbered("1"), Numbered("2")), Diary()
    gateway.routes.add_observer(diary)
    gateway.add_end_listener(lambda context: diary.notes.append(f"{context.endpoint} ended"))
    gateway.routes.replace(shares(1) | {"s": shares(1)["r"]})
    assert diary.notes == ["route r of 1", "route s of 1", "keeps r: True"]
    diary.notes.clear()
    assert await version_that_answers(gateway) == "1"
    assert diary.notes == ["asks r", "test ended"]
    gateway.routes.replace({"s": shares(1)["r"]})  # as before: it is not told again
    assert diary.notes[2:] == ["keeps r: False"]
    assert ("notes", 3) in [
        (reading.family, reading.value) for made in gateway.measurements() for reading in made.readings
    ]
    gateway.begin_exit()
    assert diary.notes[-1] == "closes"


async def test_a_model_in_memory_answers_what_no_client_waits_for() -> None:
    gateway = gateway_with(Numbered("1"))
    with RequestContext("mine", counted=True) as context:
        model = gateway.acquire_resident(context, "m")
        assert model is not None
        assert (model.generates_text, model.asks_models, model.config.version) == (False, False, "1")
        async with aclosing(model.infer(InferRequest(inputs={"A": A}))) as responses:
            assert [response async for response in responses]
            assert gateway.requests_in_flight() == 0
    [loaded] = gateway.registry.entries["m"].loaded_versions.values()
    assert loaded.in_flight.count == 0
    with pytest.raises(NotFound):
        gateway.acquire_resident(RequestContext("mine"), "n")
