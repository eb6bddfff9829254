"""A server within this process, over models that need no files: asked by threads, by event loops, and stopped."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import charonia
from charonia.inprocess.loop_thread import LoopThread

ECHO = """backend: "identity"
max_batch_size: {batch}
{scheduler}
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
input {{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] optional: true }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "TEXT_OUT" data_type: TYPE_STRING dims: [ -1 ] }}
"""
HELD = "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: [ 4 ] }"
"""A request waits a minute for three others."""
NUMBERS = np.arange(4, dtype=np.float32)


def write_models(directory: Path) -> Path:
    for name, config in {
        "echo": ECHO.format(batch=0, scheduler=""),
        "held": ECHO.format(batch=4, scheduler=HELD),
        "square": 'backend: "square"',
    }.items():
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(config)
    return directory


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[charonia.Server]:
    options: dict[str, Any] = {"model_control_mode": "explicit", "startup_models": ["echo", "held", "square"]}
    with charonia.Server(model_repository=repository, **options) as started:
        yield started


def in_flight(server: charonia.Server) -> int:
    return server.look(lambda gateway: gateway.requests_in_flight())


def wait_until_idle(server: charonia.Server) -> None:
    for _ in range(1000):
        if not in_flight(server):
            return
        time.sleep(0.005)
    raise AssertionError("a request is in flight")


def test_tensors_come_back_without_a_copy(server: charonia.Server) -> None:
    [response] = server.model("echo").infer(inputs={"IN": NUMBERS, "TEXT": ["a", b"\xff"]}, request_id="7")
    assert response.final
    assert response.request_id == "7"
    assert np.shares_memory(response.outputs["OUT"].to_numpy(), NUMBERS)
    assert response.outputs["TEXT_OUT"].to_bytes_array().tolist() == [b"a", b"\xff"]


def test_an_iterator_gives_all_responses_of_a_decoupled_model(server: charonia.Server) -> None:
    responses = [*server.model("square").infer(inputs={"IN": [5]})]
    assert [response.outputs["OUT"].to_numpy().tolist() for response in responses] == [[5]] * 5


def test_a_closed_iterator_frees_its_request(server: charonia.Server) -> None:
    with server.model("square").infer(inputs={"IN": [1_000_000]}) as responses:
        next(responses)
        assert in_flight(server) == 1
    wait_until_idle(server)
    assert [*responses] == []
    dropped = server.model("square").infer(inputs={"IN": [1_000_000]})
    next(dropped)
    del dropped
    wait_until_idle(server)


def test_a_request_is_cancelled_from_another_thread(server: charonia.Server) -> None:
    request = server.model("held").create_request(inputs={"IN": NUMBERS[None]})
    threading.Thread(target=lambda: (_wait_for(server, 1), request.cancel())).start()
    with pytest.raises(charonia.Cancelled, match="cancelled"):
        next(server.model("held").infer(request))
    wait_until_idle(server)


def _wait_for(server: charonia.Server, count: int) -> None:
    while in_flight(server) != count:
        time.sleep(0.002)


async def test_event_loops_ask_side_by_side(server: charonia.Server) -> None:
    async def ask(number: int) -> list[float]:
        async for response in server.model("held").async_infer(inputs={"IN": [[number]]}):
            return [float(value) for value in response.outputs["OUT"].to_numpy()[0]]
        raise AssertionError

    assert await asyncio.gather(*map(ask, range(4))) == [[0], [1], [2], [3]]
    numbers = [response async for response in server.model("square").async_infer(inputs={"IN": [3]})]
    assert len(numbers) == 3
    [response] = [response async for response in server.model("echo").async_infer(inputs={"IN": NUMBERS})]
    assert response.outputs["OUT"].to_numpy().tolist() == NUMBERS.tolist()


async def test_a_cancelled_task_frees_its_request(server: charonia.Server) -> None:
    async def ask() -> None:
        async for _ in server.model("held").async_infer(inputs={"IN": NUMBERS[None]}):
            raise AssertionError

    task = asyncio.create_task(ask())
    await asyncio.to_thread(_wait_for, server, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, server)


def test_threads_ask_at_once(server: charonia.Server) -> None:
    before = _count(server, "echo")
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(50):
            [response] = server.model("echo").infer(inputs={"IN": np.full(2, number, np.float32)})
            if response.outputs["OUT"].to_numpy().tolist() != [number, number]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert _count(server, "echo") - before == 400


def _count(server: charonia.Server, name: str) -> int:
    count: int = server.model(name).statistics()["model_stats"][0]["inference_count"]
    return count


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"IN": np.zeros(2)}, "inference input 'IN' data-type is 'FP64', but model 'echo' expects 'FP32'"),
        ({"IN": ["a"]}, "inference input 'IN' data-type is 'BYTES'"),
        ({"IN": NUMBERS, "X": NUMBERS}, "unexpected inference input 'X' for model 'echo'"),
        ({"IN": {}}, "input 'IN': must be an array, or lists of numbers or texts, got a dict"),
        ({"IN": [[1], [2, 3]]}, "input 'IN': a list cannot be read"),
        ({}, "expected number of inputs between 1 and 2 but got 0 inputs"),
    ],
)
def test_wrong_inputs_are_refused_by_name(server: charonia.Server, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(charonia.InvalidArgument) as refused:
        list(server.model("echo").infer(inputs=inputs))
    assert message in str(refused.value)


def test_errors_may_be_responses(server: charonia.Server) -> None:
    [response] = server.model("nothing").infer(raise_on_error=False, inputs={"IN": NUMBERS})
    assert isinstance(response.error, charonia.NotFound)
    assert response.final
    with pytest.raises(charonia.InvalidArgument, match=r"no such field: .*'output_memory'"):
        server.model("echo").infer(inputs={}, output_memory="cpu")


def test_models_are_described(server: charonia.Server) -> None:
    assert {name: model.state for name, model in server.models().items()} == dict.fromkeys(
        ("echo", "held", "square"), "READY"
    )
    model = server.model("echo", 1)
    assert model.ready()
    assert not server.model("nothing").ready()
    assert [tensor["name"] for tensor in model.metadata()["inputs"]] == ["IN", "TEXT"]
    assert model.config()["backend"] == "identity"
    assert server.metadata()["name"] == "triton"
    assert 'nv_inference_count{model="echo",version="1"}' in server.metrics()


async def test_models_are_loaded_and_unloaded(server: charonia.Server, repository: Path) -> None:
    (repository / "late" / "1").mkdir(parents=True)
    (repository / "late" / "config.pbtxt").write_text(ECHO.format(batch=0, scheduler=""))
    model = server.load("late")
    assert model.ready()
    server.unload(model)
    assert not model.ready()
    tensors = (
        [{"name": "IN", "data_type": "TYPE_INT8", "dims": [-1]}],
        [{"name": "OUT", "data_type": "TYPE_INT8", "dims": [-1]}],
    )
    config = {"backend": "identity", "input": tensors[0], "output": tensors[1]}
    model = await server.async_load("late", {"config": config})
    [response] = [response async for response in model.async_infer(inputs={"IN": [1, 2]})]
    assert response.outputs["OUT"].data_type == "INT8"
    await server.async_unload("late")
    with pytest.raises(charonia.CharoniaError, match="failed to load 'nowhere'"):
        server.load("nowhere")
    with pytest.raises(charonia.InvalidArgument, match="load takes 'config', and bytes as 'file:<path>', got 'x'"):
        server.load("late", {"x": 1})


def test_sequences_and_limits_are_parameters(server: charonia.Server) -> None:
    request = server.model("echo").create_request(correlation_id=7, flags=3, timeout=5, parameters={"a": 1})
    assert request.to_request(server.look(lambda gateway: gateway.model_config("echo"))).parameters == {
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": True,
        "timeout": 5,
        "a": 1,
    }


def test_a_server_that_does_not_run_says_so(repository: Path) -> None:
    server = charonia.Server(model_repository=[repository], load_model=["echo"], model_control_mode="explicit")
    assert not server.live()
    assert not server.ready()
    with pytest.raises(charonia.Unavailable, match="the server is not started"):
        server.model("echo").infer(inputs={"IN": NUMBERS})
    with server:
        assert server.ready()
        with pytest.raises(charonia.InvalidArgument, match="started already"):
            server.start()
        server.load("square")
        unread = server.model("square").infer(inputs={"IN": [9]})
        responses = server.model("square").infer(inputs={"IN": [1_000_000]})
        next(responses)
    server.stop()
    assert not server.live()
    for iterator in (unread, responses):
        with pytest.raises(charonia.Unavailable, match=r"the server was stopped|Server exiting"):
            next(iterator)
    with pytest.raises(charonia.Unavailable, match="the server was stopped"):
        server.models()
    with server.start():  # it may run again
        assert server.ready()


def test_a_waiting_thread_learns_of_the_end(repository: Path) -> None:
    server = charonia.Server(model_repository=repository, load_model=["held"], model_control_mode="explicit").start()
    threading.Thread(target=lambda: (_wait_for(server, 1), server.stop())).start()
    with pytest.raises(charonia.ServerExiting):
        next(server.model("held").infer(inputs={"IN": NUMBERS[None]}))


def _loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "charonia"]


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text('backend: "square" max_batch_size: 2')
    before = {*_loop_threads()}
    server = charonia.Server(model_repository=tmp_path)
    with pytest.raises(charonia.Unavailable, match=r"model 'broken' failed to load: .*must be decoupled"):
        server.start()
    assert not server.live()
    assert {*_loop_threads()} <= before  # those of earlier tests may end meanwhile


async def test_a_block_may_be_an_event_loops(repository: Path) -> None:
    options: dict[str, Any] = {"load_model": "echo", "model_control_mode": "explicit"}
    async with charonia.Server(model_repository=repository, **options) as server:
        assert server.ready()
    assert not server.live()


def test_the_last_reference_ends_a_server(repository: Path) -> None:
    server = charonia.Server(model_repository=repository, load_model=["echo"], model_control_mode="explicit").start()
    thread = weakref.ref(server.running.thread)
    loop_thread = server.running.thread._thread
    assert loop_thread is not None
    del server
    gc.collect()
    loop_thread.join(30)
    assert not loop_thread.is_alive()
    gc.collect()
    assert thread() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle_repository": "."}, "unknown argument: modle_repository; did you mean 'model_repository'?"),
        ({"http_port": 9000}, "'http_port' is about ports, processes or the log of `charonia serve`"),
        ({"allow_grpc": False}, "'allow_grpc' is about ports"),
        ({"port": 8000}, "'port' is about ports"),  # what is so by default, too
        ({"host": "127.0.0.1"}, "'host' is about ports"),
        ({"disable_log_requests": True}, "'disable_log_requests' is about ports"),
        ({"trace_level": "TIMESTAMPS"}, "'trace_config' is about ports"),
        ({"max_num_seqs": 1}, "max_num_seqs is for a single checkpoint"),
        ({"model_control_mode": "sometimes"}, 'Invalid value "sometimes" for model_control_mode'),
        ({"num_gpu_blocks_override": 5}, "here: kv_cache_blocks"),
        ({"hf_token": None}, "nothing to serve"),
        ({"hf_token": None, "max_modl_len": 9}, "did you mean 'max_model_len'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    repository = tmp_path if "max_num_seqs" in options else None
    with pytest.raises(charonia.InvalidArgument) as refused:
        charonia.Server(model_repository=repository, **options).start()
    assert message in str(refused.value)


def test_a_loop_does_not_wait_for_itself() -> None:
    async def close() -> None: ...

    async def ask(thread: LoopThread) -> int:
        return thread.run(lambda: asyncio.sleep(0, 1))

    thread = LoopThread("test")
    thread.start(close)
    with pytest.raises(charonia.InvalidArgument, match="wait for itself"):
        thread.run(lambda: ask(thread))
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: asyncio.sleep(1 // 0))
    thread.stop()
    with pytest.raises(charonia.Unavailable, match="was stopped"):
        thread.call_soon(print)
