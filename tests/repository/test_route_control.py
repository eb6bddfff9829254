"""Routes changed by requests, beside their file: which of the two counts, now and after a restart."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import CharoniaError, Conflict, Internal, InvalidArgument, NotFound, Unsupported
from charonia.core.tensor import TensorSpec
from charonia.repository import route_control
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.gateway import InProcessGateway
from charonia.repository.route_control import RouteControl, RouteRecords
from charonia.repository.state_directory import StateDirectory
from charonia.routing.route import Route, RouteArm, RouteShadow

from .test_routes import Numbered, gateway_with


def share(*weights: float) -> Route:
    return Route(tuple(RouteArm("m", number, weight) for number, weight in enumerate(weights, 1)))


class Server:
    """One after the other, each of the same directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "models" / "m").mkdir(parents=True)
        self.state: StateDirectory | None = None
        self.write({})
        self.restart()

    def write(self, weights: Mapping[str, tuple[float, ...]]) -> None:
        """What `routes.yaml` says, by the weights of versions."""
        lines = ["routes:" if weights else "routes: {}"]
        for name, each in weights.items():
            arms = ", ".join(f"{{model: m, version: {at}, weight: {weight}}}" for at, weight in enumerate(each, 1))
            lines.append(f"  {name}: {{arms: [{arms}]}}")
        (self.root / "models" / "routes.yaml").write_text("\n".join(lines))

    def restart(self, state: bool = True) -> None:
        self.close()
        catalog = RepositoryCatalog([self.root / "models"])
        self.gateway: InProcessGateway = gateway_with(Numbered("1"), Numbered("2"))
        self.state = StateDirectory(self.root / "state") if state else None
        self.control = RouteControl(self.gateway.routes, self.gateway.lifecycle, catalog, self.state)
        self.control.restore(catalog.read_routes())

    def close(self) -> None:
        if self.state is not None:
            self.state.close()

    async def poll(self) -> None:
        await self.control.follow_files(RepositoryCatalog([self.root / "models"]).read_routes())

    @property
    def served(self) -> dict[str, tuple[float, ...]]:
        """The weights of what is served."""
        served = {
            name: tuple(arm.weight for arm in each.route.arms) for name, each in self.gateway.routes.served.items()
        }
        assert sorted(served) == [entry.name for entry in self.control.entries()]
        return served

    def version(self, name: str) -> int:
        return self.control.entry(name).version


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


async def test_what_a_request_changed_is_served_and_kept(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await server.control.put("r", share(3, 1), "tenant 'ops'", 0) == 1
    document: dict[str, Any] = {"arms": [{"model": "m", "version": 2, "weight": 1}], "sticky": {"tenant": True}}
    entry = await server.control.put_document("r", document, "tenant 'ops'", 1)
    assert (entry.version, entry.changed_by, entry.route["sticky"]["tenant"]) == (2, "tenant 'ops'", True)
    assert "route 'r', version 2, by tenant 'ops': m:1 3, m:2 1 -> m:2 1; sticky by tenant" in caplog.text
    await server.control.put("s", share(1), "x")
    server.restart()
    assert server.served == {"r": (1,), "s": (1,)}
    assert server.control.entry("r") == entry
    await server.control.delete("r", "x", 2)
    assert server.served == {"s": (1,)}
    server.restart()
    assert server.served == {"s": (1,)}
    assert await server.control.put("r", share(1), "x") > 2, "a version that was once told would come again"


async def test_a_shadow_that_no_extension_serves_is_refused_and_one_that_was_kept_is_told(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    shadowed = Route((RouteArm("m", 1, 1.0),), shadow=RouteShadow("m", 2))
    with pytest.raises(InvalidArgument, match="route 'r': no extension serves its 'shadow'") as refused:
        await server.control.put("r", shadowed, "x")
    assert refused.value.field == "shadow"
    with pytest.raises(InvalidArgument, match="route 'r': no extension serves its 'shadow'"):
        await server.control.follow_files({"r": shadowed})
    with pytest.raises(InvalidArgument, match="route 'r': no extension serves its 'shadow'"):
        server.control.restore({"r": shadowed})
    assert server.served == {}
    server.gateway.routes.observed_fields = frozenset({"shadow"})
    await server.control.put("r", shadowed, "x")
    server.restart()
    assert server.served == {"r": (1,)}
    assert "no extension serves its 'shadow'; it was kept in --state-dir, and is served as far as it can" in caplog.text


async def test_a_changed_file_wins_and_says_so(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.write({"r": (3, 1), "s": (1,)})
    await server.poll()
    assert server.version("r") == 1
    await server.control.put("r", share(1, 1), "tenant 'ops'")
    await server.control.delete("s", "tenant 'ops'")
    for _ in range(2):
        await server.poll()
        assert server.served == {"r": (1, 1)}
        server.restart()
        assert server.served == {"r": (1, 1)}
    assert server.version("r") == 2
    server.write({"r": (3, 1), "s": (1,), "t": (1,)})  # says nothing new of r and s
    await server.poll()
    assert server.served == {"r": (1, 1), "t": (1,)}
    server.write({"r": (5, 1), "s": (2,), "t": (1,)})
    await server.poll()
    assert server.served == {"r": (5, 1), "s": (2,), "t": (1,)}
    assert (server.version("r"), server.version("t")) == (3, 1)
    said = "route 'r': its file was changed, and takes the place of what tenant 'ops' had made of it: m:1 1, m:2 1"
    assert said in caplog.text
    server.restart()
    assert server.served == {"r": (5, 1), "s": (2,), "t": (1,)}
    assert (server.version("r"), server.version("s"), server.version("t")) == (3, 3, 1)


async def test_a_file_that_is_changed_while_no_server_runs_wins(server: Server) -> None:
    await server.control.put("r", share(1, 1), "x")
    await server.control.put("s", share(1, 1), "x")
    server.write({"r": (9, 1)})
    server.restart()
    assert server.served == {"r": (9, 1), "s": (1, 1)}
    assert server.version("r") == 2
    server.write({})
    server.restart()
    assert server.served == {"s": (1, 1)}
    server.write({"r": (9, 1)})
    server.restart()
    assert server.version("r") > 2


async def test_a_version_that_is_not_the_one_expected_changes_nothing(server: Server) -> None:
    await server.control.put("r", share(1, 1), "x", 0)
    for expect, weights in ((0, (2, 1)), (2, (2, 1)), (7, (1, 1))):
        with pytest.raises(Conflict, match=f"route 'r' is at version 1, and version {expect} was expected"):
            await server.control.put("r", share(*weights), "x", expect)
    with pytest.raises(Conflict, match="route 's' is not there, and version 1 was expected"):
        await server.control.put("s", share(1), "x", 1)
    with pytest.raises(Conflict):
        await server.control.delete("r", "x", 2)
    assert await server.control.put("r", share(1, 1), "x", 1) == 1, "nothing was changed"
    assert server.served == {"r": (1, 1)}
    won = await asyncio.gather(
        *(server.control.put("r", share(1, n), "x", 1) for n in range(2, 6)), return_exceptions=True
    )
    assert [each for each in won if not isinstance(each, Conflict)] == [2]


ARM = {"model": "m", "weight": 1}


@pytest.mark.parametrize(
    ("name", "document", "says"),
    [
        ("m", {"arms": [ARM]}, "route 'm': a model has that name"),
        ("r", {"arms": [{**ARM, "model": "x"}]}, "route 'r': no model repository has a model 'x'"),
        ("r", {"arms": [{**ARM, "model": "s"}]}, "route 'r': its arm 's' is a route"),
        ("r", {"arms": [{**ARM, "model": "r"}]}, "route 'r': its arm 'r' is a route"),
        ("r", {"arms": [{"model": "m", "wight": 1}]}, r"route 'r': arms\[0\].wight is unknown"),
        ("r", {"arms": [{**ARM, "weight": -1}]}, r"route 'r': arms\[0\] is wrong: weight must be a finite number"),
        ("r", {"arms": [{**ARM, "weight": 1e308}]}, "weight must be a finite number .*: 0, or from 1e-09 to 1e\\+09"),
        ("r", {"arms": [{**ARM, "weight": 5e-324}]}, "weight must be a finite number"),
        ("r", {"arms": [ARM, ARM]}, "route 'r': is wrong: arm 'm' is there twice"),
        ("r", {"arms": [{**ARM, "version": at} for at in range(33)]}, "at most 32 arms, got 33"),
        ("r", [], "route 'r': must be an object, got a list"),
        ("", {"arms": [ARM]}, "a route's name must be 1 to 256 printable characters, got ''"),
        ("a\nb", {"arms": [ARM]}, r"printable characters, got 'a\\nb'"),
        (
            "r",
            {"arms": [{**ARM, "version": 1}, {**ARM, "version": 3}]},
            r"input 'A' of 'm:1' is INT32 \[-1\], of 'm:3'",
        ),
    ],
)
async def test_a_route_that_is_refused_changes_nothing(server: Server, name: str, document: Any, says: str) -> None:
    await server.control.put("s", share(1), "x")
    entry = server.gateway.registry.entries["m"]
    other = gateway_with(Numbered("3", TensorSpec("A", "FP32", (-1,)))).registry.entries["m"].loaded_versions
    entry.publish({**entry.loaded_versions, **other})
    with pytest.raises(InvalidArgument, match=says):
        await server.control.put_document(name, document, "x")
    assert server.served == {"s": (1,)}
    server.restart()
    assert server.served == {"s": (1,)}


async def test_so_many_routes_there_may_be_of_files_and_of_requests_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_control, "_MAX_ROUTES", 3)
    server.write({"a": (1,), "b": (1,)})
    await server.poll()
    puts = (server.control.put(name, share(1), "x") for name in "cde")
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidArgument)]
    assert len(refused) == 2
    assert "4 routes, of routes.yaml and of requests, are more than there may be: 3" in str(refused[0])
    served = server.served
    assert len(served) == 3
    server.write(dict.fromkeys("abfg", (1,)))
    with pytest.raises(InvalidArgument, match="are more than"):
        await server.poll()
    assert server.served == served
    await server.control.put("a", share(1, 1), "x")
    await server.control.delete("b", "x")
    with pytest.raises(InvalidArgument, match="are more than"):
        server.restart()
    server.write({})
    server.restart()


async def test_what_is_not_there_is_not_found(server: Server) -> None:
    for error in (server.control.entry, server.control.route):
        with pytest.raises(NotFound, match="there is no route 'r'"):
            error("r")
    with pytest.raises(NotFound, match="there is no route 'r'"):
        await server.control.delete("r", "x")


async def test_without_a_directory_only_the_file_counts(server: Server) -> None:
    server.write({"r": (1,)})
    server.restart(state=False)
    changes = (server.control.put("r", share(2), "x"), server.control.delete("r", "x"))
    for change in changes:
        with pytest.raises(Unsupported, match="would have to run with --state-dir"):
            await change
    assert server.served == {"r": (1,)}
    server.write({"r": (2,)})
    await server.poll()
    assert (server.served, server.version("r")) == ({"r": (2,)}, 2)


async def test_a_disk_that_refuses_leaves_the_route_as_it_was(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.control.put("r", share(1), "x")

    def refuse(*_: object) -> None:
        raise Internal("--state-dir cannot be written")

    monkeypatch.setattr(server.state, "write", refuse)
    with pytest.raises(Internal):
        await server.control.put("r", share(2), "x")
    assert (server.served, server.version("r")) == ({"r": (1,)}, 1)


async def test_a_kept_route_of_a_model_that_is_gone_is_served_with_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    (server.root / "models" / "n").mkdir()
    await server.control.put("r", Route((RouteArm("m", 1, 1), RouteArm("n"))), "x")
    (server.root / "models" / "n").rmdir()
    server.restart()
    assert "route 'r': no model repository has a model 'n'; it was kept in --state-dir" in caplog.text
    assert server.served == {"r": (1, 0)}


async def test_a_damaged_file_is_told_at_the_start(server: Server) -> None:
    await server.control.put("r", share(1), "x")
    file = server.root / "state" / "routes.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CharoniaError, match=f"{file} is damaged"):
        server.restart()


class Memory:
    """A state directory without a disk."""

    def __init__(self) -> None:
        self.kept: bytes | None = None

    def read(self, name: str, kind: type[RouteRecords]) -> RouteRecords | None:
        return None if self.kept is None else msgspec.json.decode(self.kept, type=kind)

    def write(self, name: str, kept: msgspec.Struct) -> None:
        self.kept = msgspec.json.encode(kept)


WEIGHTS = st.sampled_from([None, 1, 2])
"""Of a route: none for no route."""

STEPS = st.lists(
    st.tuples(st.sampled_from(["request", "file"]), st.sampled_from("rs"), WEIGHTS) | st.just(("restart", "", None)),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_what_is_served_is_what_was_said_last_by_a_request_or_a_file_that_changed(steps: list[Any]) -> None:
    asyncio.run(follow(steps))


async def follow(steps: list[tuple[str, str, int | None]]) -> None:
    gateway, memory, files = gateway_with(Numbered("1"), Numbered("2")), Memory(), dict[str, Route]()
    catalog = cast(RepositoryCatalog, SimpleNamespace(servable_names=lambda route: {"m"}, unknown=[]))

    def start() -> RouteControl:
        control = RouteControl(gateway.routes, gateway.lifecycle, catalog, cast(StateDirectory, memory))
        control.restore(files)
        return control

    control, expected, versions = start(), dict[str, Route](), dict[str, int]()
    for kind, name, weight in steps:
        route = None if weight is None else share(weight, 1)
        before = expected.get(name)
        if kind == "restart":
            control = start()
        elif kind == "file" and route != files.get(name):
            files = {**files, name: route} if route else {file: files[file] for file in files if file != name}
            await control.follow_files(files)
        elif kind == "request" and route is not None:
            await control.put(name, route, "x")
        elif kind == "request" and before is not None:
            await control.delete(name, "x")
        else:
            continue
        if kind != "restart":
            expected = (
                {**expected, name: route} if route else {each: expected[each] for each in expected if each != name}
            )
        assert {name: each.route for name, each in gateway.routes.served.items()} == expected
        for entry in control.entries():
            changed = entry.name == name and expected.get(name) != before
            assert (entry.version > versions.get(entry.name, 0)) if changed else (entry.version == versions[entry.name])
            versions[entry.name] = entry.version
    await gateway.lifecycle.close()
