"""Loading, replacing and unloading models while requests run; the modes none, poll and explicit."""

import asyncio
import json
import shutil
import tempfile
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import Internal, InvalidArgument, NotFound, NotReady, ServerExiting, Unavailable
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.repository import lifecycle
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.watcher import RepositoryWatcher
from charonia.routing.route import Route, RouteArm

from ..waiting import until
from .conftest import CONFIG, Toy, World

LABELLED = CONFIG.replace("output {", 'output { label_filename: "no"')
ALL = CONFIG + "version_policy { all {} }"
UNREADABLE = "failed to load 'm', failed to poll from model repository"
ZEROS = "value { data_type: TYPE_INT32 dims: 1 zero_data: true }"


async def settled() -> None:
    """What was unloaded in the background has been."""
    for _ in range(200):
        if len(asyncio.all_tasks()) == 1:
            return
        await asyncio.sleep(0.01)


async def test_versions_side_by_side(world: World) -> None:
    world.write("m", {"1": 10, "2": 20, "10": 100}, ALL)
    assert await world.start()
    assert [await world.ask("m", version) for version in ("", "1", "2", "10")] == [100, 10, 20, 100]
    assert world.gateway.served_versions("m") == ("1", "2", "10")
    assert world.gateway.model_config("m", "2").version == "2"
    with pytest.raises(NotFound, match="version 3 is not found"):
        world.gateway.model_config("m", "3")
    assert [each.version for each in world.gateway.model_statistics("m")] == ["1", "2", "10"]
    for asked in (("m", "3"), ("no", "")):
        with pytest.raises(InvalidArgument, match="is not available"):
            world.gateway.model_statistics(*asked)


@pytest.mark.usefixtures("two_at_once")
async def test_models_load_side_by_side(tmp_path: Path, toys: list[Toy]) -> None:
    """The first while servers are made, then as many as there are cores; nothing is ready before all are."""
    world, names = World(tmp_path), "abc"
    slow = {name: world.write(name, {"1": 1}) / "1" / "hangs" for name in names}
    for file in slow.values():
        file.touch()
    world.gateway.routes.replace({"route": Route((RouteArm("b", 0, 1),))})
    world.gateway.lifecycle.load_sequentially()
    starting = asyncio.create_task(world.start())
    await until(lambda: world.states() == {("a", "1"): "LOADING", ("b", ""): "UNAVAILABLE", ("c", ""): "UNAVAILABLE"})
    for asked in (("route",), ("b",), ("b", "1"), ("b:adapter",)):
        with pytest.raises(NotReady) as refused:
            await world.ask(*asked)
        assert refused.value.retry_after
    world.gateway.lifecycle.load_concurrently()
    await until(lambda: ("b", "1") in world.states())
    assert world.states()["c", ""] == "UNAVAILABLE"
    slow["b"].unlink()
    await until(lambda: ("c", "1") in world.states())
    assert (await world.ask("b"), await world.ask("route")) == (1, 1)
    for name in "ac":
        with pytest.raises(Unavailable, match=f"'{name}' is not at ready state: it is being loaded"):
            await world.ask(name)
    assert not world.gateway.ready()
    slow["a"].unlink()
    slow["c"].unlink()
    assert await starting
    assert world.gateway.ready()
    with pytest.raises(NotFound):
        await world.ask("b:adapter")
    assert world.loads[0] == "b"
    await world.gateway.lifecycle.close()


async def test_what_makes_a_model_does_not_hold_up_the_event_loop(world: World, toys: list[Toy]) -> None:
    world.write("m", {"1": 1})
    assert await world.start()
    assert toys[0].made_in is not threading.current_thread()


async def test_a_wrong_config_fails_its_model_alone(world: World) -> None:
    world.write("a", {"1": 1}, CONFIG.replace("dims: 1 }\noutput", "dims: 0 }\noutput"))
    world.write("b", {"1": 2})
    world.write("c", {"1": 3}, "nonsense")
    world.write("d", {"1": 4}, 'backend: "tensorrt"')
    world.write("e", {"1": 5}, CONFIG + "model_operations {}")
    (world.write("f", {"1": 6}) / "1" / "contradicts").write_text("")
    assert not await world.start()
    assert world.failures["a"].startswith(f"{world.root}/a/config.pbtxt:3: model input dimension must be integer >= 1")
    assert world.failures["c"].startswith(f"failed to read text proto from {world.root}/c/config.pbtxt:1:1 : ")
    assert "config.pbtxt:1: model 'd': TensorRT plans are not run: serve the ONNX model" in world.failures["d"]
    assert (
        "config.pbtxt:5: model 'e' has model_operations: operator libraries are not loaded here" in world.failures["e"]
    )
    assert world.failures["f"].endswith("config.pbtxt:3: the file says otherwise")
    assert await world.ask("b") == 2
    assert (world.gateway.ready(), world.gateway.is_model_ready("b"), world.gateway.is_model_ready("a")) == (
        False,
        True,
        False,
    )
    assert world.states() == {
        ("a", "1"): "UNAVAILABLE",
        ("b", "1"): "READY",
        ("c", ""): "UNAVAILABLE",
        ("d", "1"): "UNAVAILABLE",
        ("e", "1"): "UNAVAILABLE",
        ("f", "1"): "UNAVAILABLE",
    }


async def test_folders_that_look_like_versions_are_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (world.write("m", {"1": 1}) / "02").mkdir()
    world.write("n", {"01": 1})
    assert not await world.start()
    assert "model 'm': folder '02' is no version, for it begins with 0" in caplog.text
    assert world.failures["n"].endswith("policy of model 'n'; '01' is none, for it begins with 0")


async def test_idle_fields_are_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write(
        "m",
        {"1": 1},
        CONFIG + "instance_group { rate_limiter { priority: 2 } }\noptimization { cuda { graphs: true } }",
    )
    assert await world.start()
    assert f"{world.root}/m/config.pbtxt:5: model 'm': instance_group.rate_limiter has no effect here" in caplog.text
    assert "config.pbtxt:6: model 'm': optimization.cuda has no effect here" in caplog.text


async def test_a_reload_swaps_when_it_is_ready_and_lets_the_old_finish(world: World, toys: list[Toy]) -> None:
    world.explicit()
    model = world.write("m", {"1": 10})
    await world.gateway.load_model("m")
    [old] = toys
    running = asyncio.create_task(world.ask("m", wait=True))
    await asyncio.sleep(0)
    (model / "1" / "answer").write_text("11")
    await world.gateway.load_model("m")
    assert await world.ask("m") == 11
    assert not old.unloaded
    old.go.set()
    assert await running == 10
    await settled()
    assert old.unloaded
    assert world.states() == {("m", "1"): "READY"}


QUESTION = InferRequest(inputs={"A": Tensor.from_values("A", "INT32", [1])})


async def test_a_request_that_is_still_being_read_keeps_its_model(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10})
    await world.gateway.load_model("m")
    with world.gateway.open_request("test") as context:
        model = await world.gateway.acquire(context, "m")
        await world.gateway.unload_model("m")
        await asyncio.sleep(0.05)
        async with aclosing(model.infer(QUESTION)) as stream:
            assert (await anext(stream)).outputs[0].scalar == 10
        assert not toys[0].unloaded
    await settled()
    assert toys[0].unloaded


async def test_a_version_that_is_replaced_serves_the_requests_that_hold_it(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10})
    await world.gateway.load_model("m")
    with world.gateway.open_request("test") as context:
        model = await world.gateway.acquire(context, "m")
        world.write("m", {"2": 20})
        await world.gateway.load_model("m")
        assert await world.ask("m") == 20
        assert world.states() == {("m", "1"): "UNLOADING", ("m", "2"): "READY"}
        with pytest.raises(Unavailable, match="version 1 is not at ready state"):
            await world.ask("m", "1")
        async with aclosing(model.infer(QUESTION)) as stream:
            assert (await anext(stream)).outputs[0].scalar == 10
        assert (context.model, context.version) == ("m", "1")
    await settled()
    assert toys[0].unloaded
    assert world.states() == {("m", "1"): "UNAVAILABLE", ("m", "2"): "READY"}


async def test_what_has_not_changed_is_not_loaded_again(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10, "2": 20}, ALL)
    await world.gateway.load_model("m")
    await world.gateway.load_model("m")
    assert len(toys) == 2
    (world.root / "m" / "2" / "answer").write_text("21")
    await world.gateway.load_model("m")
    assert [toy.config.version for toy in toys] == ["1", "2", "2"]
    assert [await world.ask("m", version) for version in ("1", "2")] == [10, 21]


async def test_a_failed_reload_leaves_what_served(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10}, ALL)
    await world.gateway.load_model("m")
    world.write("m", {"2": 20, "3": 30}, ALL)
    (world.root / "m" / "3" / "fails").write_text("no weights")
    with pytest.raises(InvalidArgument) as caught:
        await world.gateway.load_model("m")
    assert caught.value.message == "load failed for model 'm': version 3 is at UNAVAILABLE state: no weights;\n"
    assert await world.ask("m") == 10
    assert [toy.unloaded for toy in toys] == [False, True]
    (world.root / "m" / "config.pbtxt").write_text("nonsense")
    with pytest.raises(Internal, match="failed to load 'm', failed to poll from model repository: failed to read text"):
        await world.gateway.load_model("m")
    assert await world.ask("m") == 10
    assert world.gateway.is_model_ready("m")


async def test_unloading(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10})
    await world.gateway.load_model("m")
    running = asyncio.create_task(world.ask("m", wait=True))
    await asyncio.sleep(0)
    await world.gateway.unload_model("m")
    assert world.states() == {("m", "1"): "UNLOADING"}
    with pytest.raises(NotFound, match="'m' has no available versions"):
        await world.ask("m")
    with pytest.raises(Unavailable, match="'m' version 1 is not at ready state"):
        await world.ask("m", "1")
    toys[0].go.set()
    assert await running == 10
    await settled()
    assert toys[0].unloaded
    [entry] = await world.gateway.repository_index()
    assert (entry.state, entry.reason) == ("UNAVAILABLE", "unloaded")
    assert world.gateway.ready()
    await world.gateway.unload_model("m")
    await world.gateway.unload_model("unknown")
    await world.gateway.load_model("m")
    assert await world.ask("m") == 10


async def test_leaving_at_once_at_the_end(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10})
    await world.gateway.load_model("m")
    running = asyncio.create_task(world.ask("m", wait=True))
    await asyncio.sleep(0)
    await world.gateway.unload_model("m")
    await asyncio.wait_for(world.gateway.lifecycle.close(), 10)
    assert toys[0].unloaded
    running.cancel()


async def test_with_another_config_and_back(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10, "2": 20})
    override = json.dumps(
        {
            "backend": "toy",
            "version_policy": {"specific": {"versions": [1]}},
            "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}],
            "output": [{"name": "A", "data_type": "TYPE_INT32", "dims": ["1"]}],
        }
    )
    for count in (1, 2):
        await world.gateway.load_model("m", override)
        assert (await world.ask("m"), len(toys)) == (10, count)
    await world.gateway.load_model("m")
    assert (await world.ask("m"), len(toys)) == (10, 2), "nothing changed on disk"
    with pytest.raises(Internal):
        await world.gateway.load_model("m", "{")
    await world.gateway.load_model("m")
    assert await world.ask("m") == 10
    (world.root / "m" / "note").write_text("anything")
    await world.gateway.load_model("m")
    assert await world.ask("m") == 20


async def test_memory_is_returned_after_an_unload_but_not_by_a_server_that_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(lifecycle, "return_freed_memory", lambda: returned.append(True))
    world.explicit()
    for name in ("m", "n"):
        world.write(name, {"1": 10})
        await world.gateway.load_model(name)
    await world.gateway.unload_model("m")
    await settled()
    assert len(returned) == 1
    await world.gateway.lifecycle.close()
    assert world.states()["n", "1"] == "UNAVAILABLE"
    assert len(returned) == 1


async def test_another_config_does_not_outlive_the_model_nor_files_of_its_own(world: World) -> None:
    world.explicit()
    world.write("m", {"1": 10, "2": 20})
    fields = {"backend": "toy", "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}]}
    override = json.dumps(fields | {"version_policy": {"specific": {"versions": [1]}}})
    await world.gateway.load_model("m", override)
    await world.gateway.unload_model("m")
    await world.gateway.load_model("m")
    assert await world.ask("m") == 20
    await world.gateway.load_model("m", override)
    await world.gateway.load_model("m", json.dumps(fields), {"5/answer": b"50"})
    await world.gateway.load_model("m")
    assert await world.ask("m") == 20


async def test_another_config_does_not_outlive_an_unload_that_waited_for_it(world: World) -> None:
    world.explicit()
    world.gateway.lifecycle.load_sequentially()
    world.write("m", {"1": 10, "2": 20})
    hangs = world.write("first", {"1": 1}) / "1" / "hangs"
    hangs.touch()
    fields = {"backend": "toy", "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}]}
    override = json.dumps(fields | {"version_policy": {"specific": {"versions": [1]}}})
    changes = [asyncio.create_task(world.gateway.load_model(*each)) for each in (("first",), ("m", override))]
    await until(lambda: world.gateway.registry.get_or_add("m").change_lock.locked())
    changes.append(asyncio.create_task(world.gateway.unload_model("m")))
    await asyncio.sleep(0)
    hangs.unlink()
    await asyncio.gather(*changes)
    await world.gateway.load_model("m")
    assert await world.ask("m") == 20


async def test_a_load_goes_on_though_its_client_leaves_until_the_end(world: World, toys: list[Toy]) -> None:
    world.explicit()
    hangs = [world.write(name, {"1": 1}) / "1" / "hangs" for name in ("m", "late")]
    loads = [asyncio.create_task(world.gateway.load_model(file.parts[-3])) for file in hangs if not file.touch()]
    await until(lambda: list(world.states().values()) == ["LOADING", "LOADING"])
    loads[0].cancel()
    hangs[0].unlink()
    await until(lambda: world.states()["m", "1"] == "READY")
    world.gateway.begin_exit()
    with pytest.raises(ServerExiting):
        await loads[1]
    hangs[1].unlink()
    await world.gateway.lifecycle.close()
    assert [toy.unloaded for toy in toys] == [True]


async def test_a_load_that_hangs_does_not_hold_up_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.explicit()
    world.write("m", {"1": 1})
    await world.gateway.load_model("m")
    world.write("hangs", {"1": 1}, LABELLED)
    read, come = threading.Event(), threading.Event()

    def hang(*_: object) -> dict[str, tuple[str, ...]]:
        read.set()
        come.wait()
        return {}

    monkeypatch.setattr("charonia.repository.builder.read_label_files", hang)
    load = asyncio.create_task(world.gateway.load_model("hangs"))
    await until(read.is_set)
    try:
        world.gateway.begin_exit()
        await asyncio.wait_for(world.gateway.lifecycle.close(), 60)
        with pytest.raises(ServerExiting):
            await load
    finally:
        come.set()


async def test_with_files_of_its_own(world: World, toys: list[Toy]) -> None:
    world.explicit()
    world.write("m", {"1": 10})
    config = json.dumps({"backend": "toy", "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}]})
    files = {"5/answer": b"50", "5/deep/er/file": b""}
    await world.gateway.load_model("new", config, files)
    await world.gateway.load_model("m", config, files)
    assert (await world.ask("new"), await world.ask("m"), world.gateway.served_versions("m")) == (50, 50, ("5",))
    directories = [toy.directory for toy in toys]
    await world.gateway.load_model("m")
    await world.gateway.unload_model("new")
    assert await world.ask("m") == 10
    await settled()
    assert [directory.exists() for directory in directories] == [False, False]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("",), InvalidArgument, "Model name cannot be empty. Please enter a valid name to deploy."),
        (
            ("../m",),
            InvalidArgument,
            "invalid model name '../m', model name must not contain path traversal characters",
        ),
        (("no",), Internal, "failed to load 'no', failed to poll from model repository: no model repository has"),
        (("no", "{}"), Internal, "failed to load 'no', failed to poll from model repository: no model repository has"),
        (("m", "{"), Internal, f"{UNREADABLE}: Invalid config override: "),
        (
            ("m", "null"),
            Internal,
            f"{UNREADABLE}: Invalid config override: a config is a mapping of fields to values, ",
        ),
        (("m", '{"bogus": 1}'), Internal, f"{UNREADABLE}: Invalid config override: bogus: "),
        (("m", "[" * 100_000), Internal, f"{UNREADABLE}: Invalid config override: "),
        (("m", '{"name": "n"}'), Internal, f"{UNREADABLE}: unexpected directory name 'm'"),
        (
            ("m", None, {"1/x": b""}),
            Internal,
            f"{UNREADABLE}: Load parameter 'config' must be specified for model file override",
        ),
        (("m", "{}", {f"1/{'x' * 300}": b""}), Internal, f"{UNREADABLE}: cannot write the files of model 'm': File"),
        (
            ("m", "{}", {"1/../../x": b""}),
            InvalidArgument,
            "Invalid file parameter '1/../../x' with normalized path '../x' must stay within model directory.",
        ),
        (("m", "{}", {"/etc/x": b""}), InvalidArgument, "Invalid file parameter '/etc/x' with normalized path "),
        (("m", "{}", {"1/a\0b": b""}), InvalidArgument, r"Invalid file parameter '1/a\x00b': no path has a NUL in it"),
        (("m", "{}", {"1/" * 1500 + "x": b""}), InvalidArgument, f"Invalid file parameter '{'1/' * 32}...': it is in"),
        (("m", "{}", {"1/\ud800": b""}), Internal, f"{UNREADABLE}: cannot write the files of model 'm': 'utf-8'"),
        (("m", "{}", {"1": b"", "1/x": b""}), Internal, f"{UNREADABLE}: cannot write the files"),
        (("m" * 300,), InvalidArgument, f"invalid model name '{'m' * 32}...', a folder's name has at most 255 bytes"),
    ],
)
async def test_what_cannot_be_loaded(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: Any,
    kind: type[Exception],
    text: str,
) -> None:
    scratch = tmp_path / ".scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    world.explicit()
    world.write("m", {"1": 10})
    with pytest.raises(kind) as caught:
        await world.gateway.load_model(*arguments)
    assert caught.value.message.startswith(text)
    assert [record.exc_info for record in caplog.records] == [None] * (kind is Internal)
    assert [entry.name for entry in (await world.gateway.repository_index())] == ["m"]
    assert world.gateway.ready()
    assert not list(scratch.iterdir())


async def test_what_could_be_loaded_is_in_the_index(world: World) -> None:
    world.explicit()
    world.write("m", {"1": 10})
    world.write("n", {"1": 10})
    await world.gateway.load_model("n")
    index = await world.gateway.repository_index()
    assert {(each.name, each.version): str(each.state) for each in index} == {("m", ""): "None", ("n", "1"): "READY"}
    assert [each.name for each in (await world.gateway.repository_index(ready_only=True))] == ["n"]
    assert world.gateway.ready()


async def test_polling_follows_the_files(world: World, toys: list[Toy]) -> None:
    world.write("m", {"1": 10})
    world.write("bad", {"1": 1}, "nonsense")
    assert not await world.start()
    world.loads.clear()
    world.failures.clear()
    await world.watcher.poll_once(world)
    assert (world.loads, world.failures) == ([], {})
    world.write("m", {"2": 20})
    world.write("new", {"1": 5})
    world.write("bad", {"1": 1}, "more nonsense")
    await world.watcher.poll_once(world)
    assert (world.loads, list(world.failures)) == (["m", "new"], ["bad"])
    assert (await world.ask("m"), await world.ask("new")) == (20, 5)
    for path in sorted((world.root / "m").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (world.root / "m").rmdir()
    await world.watcher.poll_once(world)
    with pytest.raises(NotFound, match="no available versions"):
        await world.ask("m")
    with pytest.raises(Unavailable, match="explicit model load / unload is not allowed if polling is enabled"):
        await world.gateway.load_model("new")


def series(world: World, family: str) -> dict[tuple[str, str], float]:
    """The values of a metric by model and version."""
    return {
        (measured.labels["model"], measured.labels["version"]): reading.value
        for measured in world.gateway.measurements()
        for reading in measured.readings
        if reading.family == f"charonia_model_{family}"
    }


def reasons(world: World) -> dict[str, tuple[str, str]]:
    """State and reason in the index, by version."""
    known = (shown for entry in world.gateway.registry.entries.values() for shown in entry.index())
    return {shown.version: (str(shown.state), shown.reason) for shown in known}


async def test_a_load_that_fails_while_the_model_serves_is_told_and_takes_no_readiness(world: World) -> None:
    """A new version, the files of the one that serves, and the config, each broken and then mended."""
    model = world.write("m", {"1": 10})
    assert await world.start()
    world.write("m", {"2": 20})
    (model / "2" / "fails").write_text("no weights")
    await world.watcher.poll_once(world)
    assert (world.gateway.ready(), await world.ask("m"), world.failures["m"]) == (True, 10, "no weights")
    assert reasons(world) == {"1": ("READY", ""), "2": ("UNAVAILABLE", "no weights")}
    assert series(world, "last_load_failed") == {("m", "1"): 0, ("m", "2"): 1}
    assert series(world, "resident") == {("m", "1"): 1, ("m", "2"): 0}
    shutil.rmtree(model / "2")
    (model / "1" / "fails").write_text("half a file")
    await world.watcher.poll_once(world)
    assert (world.gateway.ready(), await world.ask("m")) == (True, 10)
    assert reasons(world)["1"] == ("READY", "half a file")
    assert series(world, "last_load_failed")["m", "1"] == 1
    (model / "1" / "fails").unlink()
    await world.watcher.poll_once(world)
    assert reasons(world) == {"1": ("READY", ""), "2": ("UNAVAILABLE", "unloaded")}
    assert series(world, "last_load_failed") == series(world, "ready") | {("m", "1"): 0} == {("m", "1"): 0}
    world.write("m", {}, "nonsense")
    await world.watcher.poll_once(world)
    assert (world.gateway.ready(), await world.ask("m")) == (True, 10)
    assert reasons(world)["1"][0] == "READY"
    assert "failed to read text proto" in reasons(world)["1"][1]
    assert series(world, "last_load_failed") == {("m", ""): 1, ("m", "1"): 0}
    world.write("m", {})
    await world.watcher.poll_once(world)
    assert (reasons(world)["1"], series(world, "last_load_failed")) == (("READY", ""), {("m", "1"): 0})
    assert series(world, "load_failures_total") == {("m", ""): 1, ("m", "1"): 1, ("m", "2"): 1}


@pytest.mark.parametrize("config", ["nonsense", CONFIG])
async def test_readiness_waits_for_the_models_of_the_start_and_for_no_later_one(world: World, config: str) -> None:
    def write_broken(name: str) -> None:
        (world.write(name, {"1": 1}, config) / "1" / "fails").write_text("no")

    world.write("m", {"1": 10})
    write_broken("bad")
    assert not await world.start()
    assert not world.gateway.ready()
    with pytest.raises(NotFound, match="has no available versions"):
        await world.ask("bad")
    shutil.rmtree(world.root / "bad")
    await world.watcher.poll_once(world)
    assert (world.gateway.ready(), series(world, "last_load_failed")) == (True, {("m", "1"): 0})
    write_broken("new")
    await world.watcher.poll_once(world)
    assert (world.gateway.ready(), list(world.failures)) == (True, ["bad", "new"])
    assert sum(series(world, "last_load_failed").values()) == 1


@pytest.mark.parametrize(("config", "kind"), [("nonsense", Internal), (CONFIG, InvalidArgument)])
async def test_a_load_by_request_that_fails_is_told_and_takes_no_readiness(
    world: World, caplog: pytest.LogCaptureFixture, config: str, kind: type[Exception]
) -> None:
    world.explicit()
    (world.write("m", {"1": 10}, config) / "1" / "fails").write_text("no weights")
    with pytest.raises(kind):
        await world.gateway.load_model("m")
    assert (world.gateway.ready(), len(caplog.records)) == (True, 1)
    assert all(reason for _, reason in reasons(world).values())
    assert list(series(world, "last_load_failed").values()) == [1]
    await world.gateway.unload_model("m")
    assert (series(world, "last_load_failed"), series(world, "ready")) == ({}, {})
    (world.root / "m" / "1" / "fails").unlink()
    world.write("m", {})
    await world.gateway.load_model("m")
    assert (await world.ask("m"), list(series(world, "ready").values())) == (10, [1])
    await world.gateway.unload_model("m")
    assert series(world, "ready") == series(world, "resident") == {}


async def test_a_name_in_two_repositories_is_refused_until_one_is_gone(world: World, toys: list[Toy]) -> None:
    elsewhere = world.root.with_name(f"{world.root.name}-other")
    elsewhere.mkdir()
    other = World(elsewhere)
    for each in (world, other):
        each.write("m", {"1": 10})
    world.catalog = RepositoryCatalog([world.root, other.root])
    world.watcher = RepositoryWatcher(world.catalog, world.gateway.registry, world.gateway.lifecycle)
    both = f"{world.root}/m and {other.root}/m; none of them is served"
    assert not await world.start()
    assert both in world.failures["m"]
    shutil.rmtree(other.root / "m")
    world.failures.clear()
    await world.watcher.poll_once(world)
    assert (await world.ask("m"), world.failures) == (10, {})
    other.write("m", {"1": 20})
    for _ in range(2):
        await world.watcher.poll_once(world)
        assert not world.gateway.is_model_ready("m")
        assert (
            [both in entry.reason for entry in (await world.gateway.repository_index())],
            world.gateway.ready(),
        ) == (
            [True],
            True,
        )
    assert len(world.failures) == 1
    shutil.rmtree(world.root / "m")
    await world.watcher.poll_once(world)
    assert await world.ask("m") == 20
    world.explicit()
    world.write("m", {"1": 10})
    with pytest.raises(Internal, match=f"{UNREADABLE}: model 'm' is not unique"):
        await world.gateway.load_model("m")
    assert await world.ask("m") == 20


async def test_a_repository_that_is_away_keeps_its_models(world: World, toys: list[Toy]) -> None:
    world.write("m", {"1": 10})
    assert await world.start()
    away = world.root.with_name("away")
    world.root.rename(away)
    await world.watcher.poll_once(world)
    assert await world.ask("m") == 10
    away.rename(world.root)
    world.loads.clear()
    world.write("m", {"2": 20})
    await world.watcher.poll_once(world)
    assert (world.loads, await world.ask("m")) == (["m"], 20)


async def test_what_a_backend_completes(world: World, toys: list[Toy]) -> None:
    (world.write("m", {"1": 10}) / "1" / "size").write_text("")
    assert await world.start()
    raw = world.gateway.model_config("m").raw
    assert (raw["max_batch_size"], raw["dynamic_batching"]["preferred_batch_size"]) == (4, [4])


async def test_labels_and_warm_up(world: World, toys: list[Toy]) -> None:
    model = world.write(
        "m",
        {"1": 10},
        LABELLED.replace("dims: 1", "dims: 2")
        + 'model_warmup { name: "w" count: 2 inputs { key: "A" value '
        + '{ data_type: TYPE_INT32 dims: 2 input_data_file: "a" } } }',
    )
    (model / "no").write_text("cat\ndog\n")
    (model / "warmup").mkdir()
    (model / "warmup" / "a").write_bytes(b"\1\0\0\0\2\0\0\0")
    assert await world.start()
    assert world.gateway.model_config("m").labels == {"A": ("cat", "dog")}
    assert [(sample.request.inputs["A"].data.tolist(), sample.times) for sample in toys[0].warm_up] == [([1, 2], 2)]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LABELLED, "cannot read the labels of output 'A'"),
        (LABELLED.replace("no", "../x"), "'../x' must stay within the model directory"),
        (CONFIG + 'model_warmup { name: "w" batch_size: 3 }', "batch_size 3, more than max_batch_size 0"),
        (
            CONFIG + 'model_warmup { name: "w" inputs { key: "A" value { data_type: TYPE_INT32 dims: 2 } } }',
            "must have one of zero_data, random_data and input_data_file",
        ),
        (
            CONFIG + f"model_warmup {{ name: 'w' inputs {{ key: 'A' {ZEROS} }} inputs {{ key: 'Z' {ZEROS} }} }}",
            "config.pbtxt:5: warm-up sample 'w': unexpected inference input 'Z' for model 'm'",
        ),
        (
            CONFIG + f"model_warmup {{ name: 'w' inputs {{ key: 'A' {ZEROS.replace('INT', 'FP')} }} }}",
            "warm-up sample 'w': inference input 'A' data-type is 'FP32', but model 'm' expects 'INT32'",
        ),
        (
            CONFIG + f"model_warmup {{ name: 'w' inputs {{ key: 'A' {ZEROS.replace('s: 1', 's: 2')} }} }}",
            "warm-up sample 'w': unexpected shape for input 'A' for model 'm'. Expected [1], got [2]",
        ),
    ],
)
async def test_files_that_are_not_right(world: World, config: str, says: str) -> None:
    world.write("m", {"1": 10}, config)
    assert not await world.start()
    assert says in world.failures["m"]
