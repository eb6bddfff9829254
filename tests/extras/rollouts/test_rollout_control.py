"""Rollouts before models of a few lines: on, back, aborted, after a restart; on a clock that tests turn."""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import CharoniaError, Conflict, Internal, InvalidArgument, NotFound, Unsupported
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.tensor import TensorSpec
from charonia.extras.rollouts.rollout_control import RolloutControl
from charonia.extras.rollouts.rollout_entry import RolloutState
from charonia.repository import routed_versions
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.model_registry import LoadedModel
from charonia.repository.route_control import RouteControl
from charonia.repository.state_directory import StateDirectory
from charonia.routing.route import Route, RouteArm, RouteRule, RouteTarget, StickyKey

from ...repository import test_routed_versions
from ...repository.conftest import World
from ...repository.test_routes import Numbered, gateway_with, version_that_answers
from ...waiting import until

PLAN: dict[str, Any] = {"to": "2", "steps": [10, 50, 100], "every": 60, "min_requests": 5, "guard": "error_rate < 1 %"}
CONFIG = """
backend: "identity"
version_policy { all {} }
input { name: "A" data_type: TYPE_INT32 dims: -1 }
output { name: "A" data_type: TYPE_INT32 dims: -1 }
"""
OLD = Route((RouteArm("m", 1, 1),))


class Faulty(Numbered):
    """Fails each request while `fails`."""

    fails = False

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        if self.fails:
            raise Internal("it broke")
        async for response in super().infer(request, context):
            yield response


class Server:
    """One after the other, each of the same state."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 1000.0
        for version in "12":
            (root / "models" / "m" / version).mkdir(parents=True)
        (root / "models" / "m" / "config.pbtxt").write_text(CONFIG)
        self.state: StateDirectory | None = None
        self.restart()

    def restart(self, state: bool = True, *models: Numbered) -> None:
        self.close()
        self.new = Faulty("2")
        self.gateway = gateway_with(*(models or (Numbered("1"), self.new)))
        self.state = StateDirectory(self.root / "state") if state else None
        lifecycle, table = self.gateway.lifecycle, self.gateway.routes
        self.routes = RouteControl(table, lifecycle, RepositoryCatalog([self.root / "models"]), self.state)
        self.routes.restore({})
        self.gateway.route_control = self.routes
        self.rollouts = RolloutControl(self.gateway, self.state, lambda: self.now)
        self.gateway.add_end_listener(self.rollouts.request_ended)

    def close(self) -> None:
        if self.state is not None:
            self.state.close()

    async def ask(self, requests: int) -> Counter[str]:
        """Which versions answered."""
        answered = Counter[str]()
        for _ in range(requests):
            with suppress(Internal):
                answered[await version_that_answers(self.gateway)] += 1
        return answered

    async def pass_interval(self, requests: int = 60) -> None:
        await self.ask(requests)
        self.now += 60
        await self.rollouts.advance()

    @property
    def weights(self) -> dict[str, float]:
        return {arm.label: arm.weight for arm in self.routes.route("r")[0].arms}

    @property
    def state_of_rollout(self) -> RolloutState:
        return self.rollouts.rollout("r").state


def rollout_readings(server: Server) -> Iterator[tuple[object, ...]]:
    for measured in server.rollouts.measure():
        for reading in measured.readings:
            yield (*measured.labels.values(), reading.family, reading.value)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server, None]:
    server = Server(tmp_path)
    await server.routes.put("r", OLD, "test")
    yield server
    server.close()


async def test_a_rollout_goes_on_step_by_step_until_the_new_version_serves_alone(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    started = await server.rollouts.start("r", PLAN, "tenant 'ops'")
    assert (started.to, started.state, started.step, started.steps) == ("m:2", "running", 0, (10, 50, 100))
    assert server.weights == {"m:1": 90, "m:2": 10}
    assert await server.ask(20) == {"1": 18, "2": 2}
    assert server.rollouts.rollout("r").progress == "2 of 5 requests, 0 of 60 s"
    server.now += 60
    await server.rollouts.advance()
    assert server.weights == {"m:1": 90, "m:2": 10}, "too few requests"
    await server.ask(30)
    await server.rollouts.advance()
    assert server.weights == {"m:1": 50, "m:2": 50}
    assert (server.rollouts.rollout("r").step, server.rollouts.rollout("r").progress[:6]) == (1, "0 of 5")
    await server.pass_interval()
    assert server.weights == {"m:1": 0, "m:2": 100}
    assert await server.ask(5) == {"2": 5}
    await server.pass_interval()
    assert server.weights == {"m:2": 100}
    ended = server.rollouts.rollout("r")
    assert (ended.state, ended.progress) == ("forward", "")
    assert ended.ended_at
    assert [event.text.split(": ")[0] for event in ended.events] == [
        "begun by tenant 'ops'",
        "on to step 2 of 3, 50 %",
        "on to step 3 of 3, 100 %",
        "m:2 serves alone",
    ]
    assert "rollout of route 'r' to m:2: on to step 2 of 3, 50 %: error_rate < 1 %: 0 % (0 of 5)" in caplog.text
    assert server.routes.entry("r").changed_by == "the rollout to m:2"


async def test_a_version_that_fails_goes_back_to_the_weights_that_were(server: Server) -> None:
    before = Route((RouteArm("m", 1, 3), RouteArm("m", 2, 1)), StickyKey(tenant=True))
    await server.routes.put("r", before, "test")
    await server.rollouts.start("r", {**PLAN, "steps": [50, 100], "min_requests": 300}, "x")
    await server.routes.put("r", before, "test")
    await server.rollouts.advance()
    assert server.state_of_rollout is RolloutState.SUPERSEDED
    assert "route 'r' was changed by test, which ends the rollout" in server.rollouts.rollout("r").reason
    await server.routes.put("r", OLD, "test")
    await server.rollouts.start("r", {**PLAN, "min_requests": 60}, "x")
    server.new.fails = True
    await server.ask(150)
    await server.rollouts.advance()  # long before the interval is over
    assert server.routes.route("r")[0] == OLD
    ended = server.rollouts.rollout("r")
    assert (ended.state, ended.ended_at is None) == ("back", False)
    assert ended.reason == "error_rate < 1 %: 100 % (15 of 15), of the other arms 0 % (0 of 135)"
    assert await server.ask(10) == {"1": 10}
    assert list(rollout_readings(server)) == [("r", "back", "charonia_rollout_decisions_total", 1)]


async def test_a_restart_goes_on_in_the_step_that_was(server: Server) -> None:
    await server.rollouts.start("r", PLAN, "x")
    await server.pass_interval()
    assert server.weights == {"m:1": 50, "m:2": 50}
    await server.ask(8)
    server.restart()
    assert server.weights == {"m:1": 50, "m:2": 50}
    assert (server.rollouts.rollout("r").step, server.rollouts.rollout("r").progress) == (1, "")
    await server.rollouts.advance()
    assert server.rollouts.rollout("r").progress == "0 of 5 requests, 0 of 60 s"
    assert "the server has started again: step 2 of 3, 50 %" in server.rollouts.rollout("r").events[-1].text
    await server.pass_interval()
    await server.pass_interval()
    assert server.weights == {"m:2": 100}
    server.restart()
    await server.rollouts.advance()
    assert server.state_of_rollout is RolloutState.FORWARD
    assert server.weights == {"m:2": 100}


async def test_a_restart_between_the_route_and_its_record_ends_in_the_step_that_was_kept(server: Server) -> None:
    await server.rollouts.start("r", PLAN, "x")
    step, _ = server.routes.route("r")
    await server.routes.put("r", Route((RouteArm("m", 1, 50), RouteArm("m", 2, 50))), "the rollout")
    server.restart()
    await server.rollouts.advance()
    assert server.routes.route("r")[0] == step
    await server.routes.put("r", Route((RouteArm("m", 1, 7), RouteArm("m", 2, 1))), "somebody")
    server.restart()
    await server.rollouts.advance()
    assert server.state_of_rollout is RolloutState.SUPERSEDED
    assert server.weights == {"m:1": 7, "m:2": 1}


async def test_an_aborted_rollout_goes_back(server: Server) -> None:
    await server.rollouts.start("r", PLAN, "x")
    aborted = await server.rollouts.abort("r", "tenant 'ops'")
    assert (aborted.state, aborted.reason) == ("aborted", "aborted by tenant 'ops'")
    assert server.routes.route("r")[0] == OLD
    with pytest.raises(Conflict, match="route 'r' has no rollout that runs"):
        await server.rollouts.abort("r", "x")
    assert (await server.rollouts.start("r", PLAN, "x")).state == "running"
    await server.routes.delete("r", "x")
    await server.rollouts.advance()
    assert server.state_of_rollout is RolloutState.SUPERSEDED


async def test_an_arm_that_is_the_latest_version_gets_its_number(server: Server) -> None:
    server.restart(True, Numbered("1"), Numbered("2"), Numbered("3"))
    rules = (RouteRule(to=RouteTarget("m"), header="x-old"),)
    await server.routes.put("r", Route((RouteArm("m", 0, 1),), rules=rules), "test")
    with pytest.raises(InvalidArgument, match="'m:3' has 100 % of route 'r' already: there is nothing to roll out"):
        await server.rollouts.start("r", {**PLAN, "to": "3"}, "x")
    await server.rollouts.start("r", PLAN, "x")
    assert server.weights == {"m:3": 90, "m:2": 10}
    for _ in range(3):
        await server.pass_interval()
    assert server.weights == {"m:3": 0, "m:2": 100}, "a rule names it"


@pytest.mark.parametrize(
    ("plan", "kind", "says"),
    [
        ({"to": "3"}, InvalidArgument, "model 'm' has no version 3"),
        ({"to": "x:1"}, NotFound, "no version of model 'x' is served, which 'x:1' is to be of"),
        ({"to": 2}, InvalidArgument, "to must be 'VERSION' or 'MODEL:VERSION', got '2'"),
        ({"to": "m:"}, InvalidArgument, "to must be"),
        ({"to": "0"}, InvalidArgument, "needs the number of a version"),
        ({"to": "1"}, InvalidArgument, "'m:1' has 100 % of route 'r' already"),
        ({"steps": [50]}, InvalidArgument, "the last of the steps must be 100"),
        ({"guard": "p99 < 5"}, InvalidArgument, "guard 'p99 < 5'"),
        ({"evry": 5}, InvalidArgument, "evry"),
        ({"every": "x"}, InvalidArgument, "every"),
    ],
)
async def test_a_rollout_that_cannot_begin_says_why(
    server: Server, plan: dict[str, Any], kind: type[CharoniaError], says: str
) -> None:
    with pytest.raises(kind) as raised:
        await server.rollouts.start("r", {**PLAN, **plan}, "x")
    assert says in raised.value.message
    assert server.routes.route("r") == (OLD, 1)
    with pytest.raises(NotFound, match="route 'r' has had no rollout"):
        server.rollouts.rollout("r")


async def test_a_rollout_is_refused_for_what_its_route_would_be(server: Server) -> None:
    with pytest.raises(NotFound, match="there is no route 's'"):
        await server.rollouts.start("s", PLAN, "x")
    await server.rollouts.start("r", PLAN, "x")
    with pytest.raises(Conflict, match="route 'r' has a rollout to m:2 already: abort it first"):
        await server.rollouts.start("r", PLAN, "x")
    await server.rollouts.abort("r", "x")
    server.restart(True, Numbered("1"), Numbered("2", TensorSpec("A", "FP32", (-1,))))
    with pytest.raises(InvalidArgument, match="input 'A' of 'm:1' is INT32"):
        await server.rollouts.start("r", PLAN, "x")
    assert server.routes.route("r")[0] == OLD


async def test_a_route_that_has_all_arms_that_it_may_takes_no_other(server: Server) -> None:
    server.restart(True, *[Numbered(str(number)) for number in range(1, 34)])
    await server.routes.put("r", Route(tuple(RouteArm("m", number, 1) for number in range(1, 33))), "x")
    with pytest.raises(InvalidArgument, match="route 'r': a route has at most 32 arms, got 33"):
        await server.rollouts.start("r", {**PLAN, "to": "33"}, "x")


async def test_without_a_state_directory_there_are_no_rollouts(server: Server) -> None:
    server.restart(state=False)
    server.routes.restore({"r": OLD})
    with pytest.raises(Unsupported, match="--state-dir"):
        await server.rollouts.start("r", PLAN, "x")
    assert server.weights == {"m:1": 1}


async def test_what_cannot_be_kept_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.state is not None
    write, full = server.state.write, False

    def write_or_fail(name: str, kept: Any) -> None:
        if full and name == "rollouts":
            raise Internal("the disk is full")
        write(name, kept)

    monkeypatch.setattr(server.state, "write", write_or_fail)
    full = True
    with pytest.raises(Internal, match="the disk is full"):
        await server.rollouts.start("r", PLAN, "x")
    assert server.routes.route("r")[0] == OLD
    full = False
    await server.rollouts.start("r", {**PLAN, "min_requests": 60}, "x")
    full, server.new.fails = True, True
    await server.ask(150)
    for _ in range(3):
        await server.rollouts.advance()
        assert server.routes.route("r")[0] == OLD
    assert caplog.text.count("the disk is full") == 1
    full = False
    await server.rollouts.advance()
    assert server.state_of_rollout is RolloutState.BACK


async def test_the_task_takes_it_up(server: Server) -> None:
    await server.rollouts.start("r", PLAN, "x")
    server.restart()
    async with server.rollouts.running():
        await until(lambda: server.rollouts.rollout("r").progress != "")


async def test_the_share_of_the_new_version_is_measured_while_it_runs(server: Server) -> None:
    await server.rollouts.start("r", PLAN, "x")
    assert list(rollout_readings(server)) == [
        ("m", "2", "charonia_rollout_share_ratio", 0.1),
        ("r", "back", "charonia_rollout_decisions_total", 0),
    ]
    await server.rollouts.abort("r", "x")
    assert [reading[-2:] for reading in rollout_readings(server)] == [("charonia_rollout_decisions_total", 1)]
    loaded = server.gateway.registry.entries["m"].loaded_versions.values()
    assert all(isinstance(each, LoadedModel) and each.in_flight.count == 0 for each in loaded)


async def test_the_new_version_is_loaded_if_it_fits_and_goes_with_the_rollout(
    world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_versions, "_LOOK_SECONDS", 0.001)
    routed = test_routed_versions.Routed(world, tmp_path_factory.mktemp("state") / "state")
    routed.serve(budget=25 * test_routed_versions.MIB)
    await world.start()
    await routed.put(3)
    gateway = world.gateway
    gateway.route_control = routed.control
    rollouts = RolloutControl(gateway, routed.state)
    plan = {**PLAN, "to": "2", "steps": [1, 100]}
    await rollouts.start("r", plan, "x")
    assert routed.loaded == ["2", "3"]
    with pytest.raises(Conflict):
        await rollouts.start("r", {**plan, "to": "1"}, "x")
    await rollouts.abort("r", "x")
    await until(lambda: routed.loaded == ["3"])
    await routed.put(3, 1)
    says = r"version 2 needs at least 10.0 MiB of memory and 5.0 MiB of 25.0 MiB is free"
    with pytest.raises(InvalidArgument, match=says):
        await rollouts.start("r", plan, "x")
    assert routed.loaded == ["1", "3"]
    assert rollouts.rollout("r").state == "aborted", "the one before"
    await gateway.lifecycle.close()
    routed.state.close()
