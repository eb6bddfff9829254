"""Routes before models of a few lines: which arm answers, under which name, and what is refused."""

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument, NotFound, Unavailable
from charonia.core.model import Capabilities, ModelConfig
from charonia.core.request import InferRequest
from charonia.core.tensor import TensorSpec
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_registry import LoadedModel
from charonia.routing.route import Route, RouteArm, RouteRule, RouteTarget

from .test_gateway import A, Echo


class Numbered(Echo):
    def __init__(self, version: str, *inputs: TensorSpec) -> None:
        super().__init__("m")
        self.config = ModelConfig(
            "m", version, "echo", inputs=inputs or self.config.inputs, outputs=self.config.outputs
        )


def gateway_with(*models: Numbered) -> InProcessGateway:
    gateway = InProcessGateway()
    entry = gateway.registry.get_or_add("m")
    entry.publish({model.config.version: LoadedModel(model, model.config) for model in models})
    return gateway


def shares(*weights: float) -> dict[str, Route]:
    return {"r": Route(tuple(RouteArm("m", number, weight) for number, weight in enumerate(weights, 1)))}


async def version_that_answers(gateway: InProcessGateway, **parameters: object) -> str:
    with gateway.open_request("test") as context:
        model = await gateway.acquire(context, "r")
        async with aclosing(model.infer(InferRequest(inputs={"A": A}, parameters=parameters))) as responses:  # type: ignore[arg-type]
            assert [response async for response in responses]
        assert (model.name, model.config.name) == ("r", "r")
        assert context.arm == f"m:{model.config.version}"
    return model.config.version


async def test_requests_are_divided_and_answered_by_the_name_of_the_route() -> None:
    gateway = gateway_with(Numbered("1"), Numbered("2"))
    gateway.routes.replace(shares(3, 1))
    assert sorted([await version_that_answers(gateway) for _ in range(8)]) == ["1"] * 6 + ["2"] * 2
    assert gateway.is_model_ready("r")
    assert gateway.model_config("r").name == "r"
    assert gateway.served_versions("r") == ("1", "2")
    counted = gateway.model_statistics("r")
    assert [(each.name, each.version, each.arm) for each in counted] == [("r", "1", "m:1"), ("r", "2", "m:2")]
    assert [each.statistics.inference.success.count for each in counted] == [6, 2]
    assert gateway.model_statistics("r", "2") == counted[1:]
    assert [config.name for config in gateway.model_configs()] == ["m", "r"]
    with pytest.raises(NotFound, match="'r' is a route, which has no versions"), gateway.open_request("t") as context:
        await gateway.acquire(context, "r", "1")


async def test_counts_are_kept_of_arms_that_there_are_and_of_some_that_were() -> None:
    gateway = gateway_with(Numbered("1"))
    entry = gateway.registry.entries["m"]
    for number in map(str, range(2, 80)):
        entry.publish({**entry.loaded_versions, number: LoadedModel(model := Numbered(number), model.config)})
        gateway.routes.replace({"r": Route((RouteArm("m", 1, 1), RouteArm("m", int(number), 1)))})
        assert {await version_that_answers(gateway) for _ in range(2)} == {"1", number}
    [first, last] = gateway.model_statistics("r")
    assert (first.statistics.inference_count, last.statistics.inference_count) == (78, 1)
    assert len([*gateway.routes.served["r"].measurements()]) == 64


class Retaining(Numbered):
    """Notes which scopes are released."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.released: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(retention=self)

    def release_scope(self, tenant: str, scope: str) -> None:
        self.released.append(f"{tenant}:{scope}")


def test_a_session_is_released_wherever_requests_for_that_name_may_have_gone() -> None:
    first, second = Retaining("1"), Retaining("2")
    gateway = gateway_with(first, second, Numbered("3"))
    gateway.routes.replace(shares(1, 1) | {"none": Route((RouteArm("gone", 1, 1),))})
    for name in ("m", "r", "none"):
        gateway.release_scope(name, "team", name)
    assert first.released == second.released == ["team:m", "team:r"]
    with pytest.raises(NotFound, match="'other' is not found"):
        gateway.release_scope("other", "team", "s")
    with pytest.raises(InvalidArgument, match="'m' retains nothing"):
        gateway_with(Numbered("1")).release_scope("m", "team", "s")
    entry = gateway.registry.entries["m"]
    entry.evict()
    gateway.release_scope("m", "team", "s")  # what is not in memory retains nothing


async def test_a_sequence_stays_where_it_began_also_when_the_route_changes() -> None:
    gateway = gateway_with(Numbered("1"), Numbered("2"))
    gateway.routes.replace(shares(1, 1))
    begun = {id_: await version_that_answers(gateway, sequence_id=id_, sequence_start=True) for id_ in range(1, 9)}
    assert set(begun.values()) == {"1", "2"}
    gateway.routes.replace(shares(1, 0))
    assert {id_: await version_that_answers(gateway, sequence_id=id_) for id_ in begun} == begun
    assert {id_: await version_that_answers(gateway, sequence_id=id_, sequence_end=True) for id_ in begun} == begun
    assert {await version_that_answers(gateway, sequence_id=id_, sequence_start=True) for id_ in begun} == {"1"}
    entry = gateway.registry.entries["m"]
    assert [loaded.in_flight.count for loaded in entry.loaded_versions.values()] == [0, 0]


async def test_fields_of_a_request_choose_where_it_is_known() -> None:
    gateway = gateway_with(Numbered("1"), Numbered("2"))
    arms = shares(1, 0)["r"].arms
    gateway.routes.replace({"r": Route(arms, rules=(RouteRule(to=RouteTarget("m", 2), field="tier", equals="gold"),))})
    assert await version_that_answers(gateway, tier="gold") == "2"
    assert await version_that_answers(gateway, tier="iron") == "1"
    assert await version_that_answers(gateway, tier="gold", sequence_id=1, sequence_start=True) == "2"
    assert await version_that_answers(gateway, tier="iron", sequence_id=1) == "2"
    for body, version in (({"tier": "gold"}, "2"), ({"model": "r"}, "1")):
        with gateway.open_request("test") as context:
            context.body = body
            assert (await gateway.acquire(context, "r")).config.version == version
            assert context.body is None
    with gateway.open_request("test") as outer:
        held = await gateway.acquire(outer, "r")
        for tier, version in (("gold", "2"), ("iron", "1")):
            request = InferRequest(inputs={"A": A}, parameters={"tier": tier})
            assert held.answer_now(request) is None
            with outer.child("step") as context:
                model = held.for_request(context)
                async with aclosing(model.infer(request)) as responses:
                    assert [response async for response in responses]
                assert (model.config.version, context.arm) == (version, f"m:{version}")
    entry = gateway.registry.entries["m"]
    assert [loaded.in_flight.count for loaded in entry.loaded_versions.values()] == [0, 0]


async def test_an_arm_that_is_not_there_hinders_none_that_a_field_chooses() -> None:
    gateway = gateway_with(Numbered("2"))
    gateway.routes.replace(
        {"r": Route(shares(1, 1)["r"].arms, rules=(RouteRule(to=RouteTarget("m", 2), field="tier"),))}
    )
    assert {await version_that_answers(gateway, tier="gold") for _ in range(4)} == {"2"}
    with pytest.raises(NotFound, match="version 1 is not found"):
        await version_that_answers(gateway)


async def test_arms_that_differ_are_refused_with_the_tensor() -> None:
    gateway = gateway_with(Numbered("1"), Numbered("2", TensorSpec("A", "FP32", (-1,))))
    gateway.routes.replace(shares(1, 1))
    says = r"route 'r' cannot be served: input 'A' of 'm:1' is INT32 \[-1\], of 'm:2' FP32 \[-1\]"
    with pytest.raises(Unavailable, match=says):
        await version_that_answers(gateway)


async def test_an_arm_that_is_not_loaded_is_no_ready_route() -> None:
    gateway = gateway_with(Numbered("1"))
    gateway.routes.replace(shares(1, 1))
    assert not gateway.is_model_ready("r")
    gateway.routes.replace(shares(1, 0))
    assert gateway.is_model_ready("r")
    assert gateway.routes.replace({}) == ["r"]
    assert not gateway.is_model_ready("r")


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        ("m: {arms: [{model: m, weight: 1}]}", "route 'm': a model has that name"),
        ("r: {arms: [{model: x, weight: 1}]}", "route 'r': no model repository has a model 'x'"),
        ("r: {arms: [{model: s, weight: 1}]}\n  s: {arms: [{model: m, weight: 1}]}", "its arm 's' is a route"),
        ("r: {arms: [{model: m, wight: 1}]}", r"routes.yaml: .*unknown field `wight`.*arms\[0\]"),
        ("r: {arms: [{model: m, weight: -1}]}", "weight must be a finite number of at least 0, got -1"),
        ("r: {arms: [{model: m}]}", "no arm has a weight above 0"),
        ("r: {arms: [{model: m, weight: 1}, {model: m, weight: 2}]}", "arm 'm' is there twice"),
        ("r: {arms: [{model: m, weight: 1}], sticky: {}}", "sticky needs one of header, field, or tenant: true"),
        (
            "r: {arms: [{model: m, weight: 1}], rules: [{tenant: a, to: {model: m, version: 3}}]}",
            "'m:3', which is no arm",
        ),
        ("r: [", r"routes.yaml:\d+:\d+: "),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path: Path, routes: str, says: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "routes.yaml").write_text(f"routes:\n  {routes}\n")
    with pytest.raises(InvalidArgument, match=says):
        RepositoryCatalog([tmp_path]).read_routes()


async def test_no_request_is_lost_over_a_hundred_switches() -> None:
    gateway, answered, done = gateway_with(Numbered("1"), Numbered("2")), Counter[str](), asyncio.Event()
    gateway.routes.replace(shares(1, 0))

    async def ask() -> None:
        while not done.is_set():
            answered[await version_that_answers(gateway)] += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(ask())
        for switch in range(100):
            weights = (0, 1) if switch % 2 == 0 else (1, 0)
            gateway.routes.replace(shares(*weights))
            await asyncio.sleep(0.001)
        done.set()
    assert min(answered["1"], answered["2"]) > 100
    entry = gateway.registry.entries["m"]
    assert [loaded.in_flight.count for loaded in entry.loaded_versions.values()] == [0, 0]
