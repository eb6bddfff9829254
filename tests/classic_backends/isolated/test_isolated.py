"""Instances in processes of their own: tensors there and back, failures, ends of all kinds, and who comes after."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from charonia.classic_backends.batching import instance, instance_pool
from charonia.classic_backends.batching.instance_pool import EXECUTION_TIMEOUT, RESTART_PAUSE
from charonia.classic_backends.isolated.instance_main import (
    OPENMP_SPINS,
    InstanceTask,
    TensorConnection,
)
from charonia.classic_backends.isolated.isolated_runtime import (
    EXECUTION_PARAMETER,
    ISOLATED,
    IsolatableLoader,
    IsolatedRuntime,
)
from charonia.classic_backends.model import ClassicModel
from charonia.core.errors import CharoniaError, Internal, InvalidArgument, Unavailable
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.runtime import InstancePlacement
from charonia.core.tensor import Tensor, TensorSpec
from charonia.processes import gc_tuning
from charonia.processes.child_process import anonymous_file
from charonia.processes.host import LAST_NICENESS, NICENESS

from ...waiting import until
from ..asking import answers

ORIGIN = "isolated_subject:SUBJECT"
LOADER = IsolatableLoader(ORIGIN, ISOLATED, completes_in_process=True)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


# Memory


def texts() -> st.SearchStrategy[NDArray[Any]]:
    shapes = arrays_of.array_shapes(min_dims=0, min_side=0, max_side=3)
    return shapes.flatmap(
        lambda shape: arrays_of.arrays(object, shape, elements=st.binary(max_size=9), fill=st.nothing())
    )


def numbers() -> st.SearchStrategy[NDArray[Any]]:
    types = st.sampled_from(["?", "u1", "u2", "i4", "i8", "f2", "f4", "f8"])
    shapes = arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4)
    plain = types.flatmap(lambda name: shapes.flatmap(lambda shape: arrays_of.arrays(name, shape)))
    return plain | plain.map(lambda array: array.T) | plain.map(lambda array: array[..., ::2] if array.ndim else array)


@contextmanager
def connected() -> Iterator[tuple[TensorConnection[Any], TensorConnection[Any]]]:
    files = anonymous_file("here to there"), anonymous_file("there to here")
    here, there = Pipe()
    with here, there:
        yield TensorConnection(here, files[::-1], Any), TensorConnection(there, files, Any)
    for file in files:
        os.close(file)


@given(st.lists(texts() | numbers(), max_size=4))
@settings(max_examples=60)
def test_what_is_written_here_is_read_there(given_arrays: list[NDArray[Any]]) -> None:
    with connected() as (here, there):
        made = there.read(here.write({str(index): array for index, array in enumerate(given_arrays)}))
    for array, same in zip(given_arrays, made.values(), strict=True):
        assert same.dtype == array.dtype
        np.testing.assert_array_equal(same, array)


def test_arrays_outlive_the_connection_and_blocks_the_last_of_their_arrays() -> None:
    large = np.arange(1 << 20)
    with connected() as (here, there):
        [early] = there.read(here.write({"X": np.arange(3) + 7})).values()
        [view] = there.read(here.write({"X": large})).values()
        assert here._writer.used_bytes > large.nbytes
        there.send(None)
        here.receive()
        assert here._writer.used_bytes > large.nbytes
        kept = view[5:7]
        del view
        np.testing.assert_array_equal(early, [7, 8, 9])
        there.send(None)
        here.receive()
        assert here._writer.used_bytes > large.nbytes
        del kept
        there.send(None)
        here.receive()
        assert here._writer.used_bytes == 64
    assert early.tolist() == [7, 8, 9]


def test_what_cannot_be_written_leaves_nothing() -> None:
    with connected() as (here, _):
        for wrong in (np.array([b"", 1], object), np.ones(2, complex)):
            with pytest.raises(TypeError, match="tensor 'B'"):
                here.write({"A": np.ones(9), "B": wrong})
        assert here._writer.used_bytes == 0


# One instance


def model_config(**fields: Any) -> ModelConfig:
    inputs = TensorSpec("X", "INT64", (-1,), optional=True), TensorSpec("DO", "BYTES", (1,), optional=True)
    return ModelConfig("subject", "1", "test", inputs=inputs, outputs=(TensorSpec("Y", "INT64", (-1,)),), **fields)


def opened(directory: Path, niceness: int = NICENESS, *, keeps_memory: bool = False, **fields: Any) -> IsolatedRuntime:
    placement = InstancePlacement(name="subject_0")
    task = InstanceTask(ORIGIN, directory, model_config(**fields), placement, {}, niceness)
    return IsolatedRuntime(task, keeps_memory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("subject")


@pytest.fixture(scope="module")
def runtime(directory: Path) -> Iterator[IsolatedRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        made = opened(directory)
    yield made
    pid = pid_of(made)
    process = made._process
    assert process.return_memory in gc_tuning.memory_releases
    made.close()
    assert process.return_memory not in gc_tuning.memory_releases
    process.return_memory()
    assert (directory / "closed").exists()
    assert not alive(pid)


def test_memory_that_is_taken_again_is_returned_late(directory: Path) -> None:
    runtime = opened(directory, keeps_memory=True)
    process = runtime._process
    assert process.return_memory in gc_tuning.late_releases - gc_tuning.memory_releases
    runtime.close()
    assert process.return_memory not in gc_tuning.late_releases


def pid_of(runtime: IsolatedRuntime) -> int:
    [made] = runtime.execute({"DO": order("process")}, ["Y"])
    return int(made["Y"][0, 0])


def order(do: str) -> NDArray[Any]:
    return np.array([[do.encode()]], object)


def ask(runtime: IsolatedRuntime, do: str = "echo", **inputs: Any) -> Mapping[str, NDArray[Any]]:
    [made] = runtime.execute({"DO": order(do), **inputs}, [name for name in ("X", "S", "B") if name in inputs])
    return made


def test_it_computes_in_another_process_whose_main_thread_is_the_models(runtime: IsolatedRuntime) -> None:
    [made] = runtime.execute({"DO": order("process")}, ["Y"])
    assert made["Y"][0, 0] != os.getpid()
    assert made["Y"][0, 1] == 1
    assert runtime.traits.ragged
    assert Path(f"/proc/{made['Y'][0, 0]}/comm").read_text() == "charonia-model\n"


@pytest.mark.parametrize(
    ("told", "spins", "niceness"), [(None, OPENMP_SPINS, NICENESS), ("passive", -1, LAST_NICENESS)]
)
def test_it_leaves_the_cores_to_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, spins: int, niceness: int
) -> None:
    """Unless the user has said how threads are to wait."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", told)
    runtime = opened(directory, niceness)
    try:
        [made] = runtime.execute({"DO": order("shares")}, ["Y"])
    finally:
        runtime.close()
    policy = os.SCHED_IDLE if niceness == LAST_NICENESS else os.sched_getscheduler(0)
    assert made["Y"].tolist() == [[min(os.nice(0) + niceness, 19), spins, policy]]


def test_outputs_stay_when_the_next_batch_comes(runtime: IsolatedRuntime) -> None:
    mixed = {"X": np.eye(3, dtype=np.float32), "S": np.array([[b"", b"caf\xc3\xa9"]], object), "B": np.array([], bool)}
    first = ask(runtime, **mixed)
    ask(runtime, X=np.zeros((3, 3), np.float32))
    large = np.random.default_rng(1).random((300, 1000))
    np.testing.assert_array_equal(ask(runtime, X=large)["X"], large)
    for name, array in mixed.items():
        np.testing.assert_array_equal(first[name], array)
        assert first[name].dtype == array.dtype


def test_memory_stays_whatever_is_executed(runtime: IsolatedRuntime) -> None:
    """Failures included."""
    batch = np.zeros(1 << 18)
    for turn in range(8):
        with suppress(Internal):
            ask(runtime, "fail" if turn % 2 else "echo", X=batch)
        tensors = runtime._process.tensors
        assert tensors._writer.used_bytes <= 2 * batch.nbytes + 4096
        assert os.fstat(tensors._reader._descriptor).st_size <= 3 * batch.nbytes


def test_memory_that_is_free_is_given_back(runtime: IsolatedRuntime) -> None:
    large, process = np.arange(1 << 18), runtime._process
    tensors = process.tensors

    def size() -> int:
        return min(tensors._writer.size, os.fstat(tensors._reader._descriptor).st_size)

    kept = ask(runtime, X=large)["X"]
    assert size() >= large.nbytes
    process.return_memory()
    assert ask(runtime, X=np.ones(1))["X"].tolist() == [1]
    assert kept.sum() == large.sum(), "it is still read"
    del kept
    ask(runtime, X=np.ones(1))  # the process tells that it has read the input, and learns that its output was
    process.return_memory()
    assert ask(runtime, X=np.ones(1))["X"].tolist() == [1]
    assert os.fstat(tensors._reader._descriptor).st_size == tensors._writer.size == large.nbytes // 2


def test_inputs_are_read_only_there(runtime: IsolatedRuntime) -> None:
    with pytest.raises(Internal, match="message: ValueError: assignment destination is read-only"):
        ask(runtime, "write", X=np.ones(1))


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("fail", "message: ValueError: that hurts"),
        ("leave", "message: SystemExit: 3"),
        ("text", "message: TypeError: tensor 'Y' must hold bytes"),
    ],
)
def test_what_fails_there_fails_here_and_it_goes_on(
    runtime: IsolatedRuntime, caplog: pytest.LogCaptureFixture, do: str, message: str
) -> None:
    before = pid_of(runtime)
    with pytest.raises(Internal, match=f"^Failed to process the request.* for model instance 'subject_0', {message}"):
        ask(runtime, do, X=np.ones(1))
    assert "Traceback" in caplog.text
    assert pid_of(runtime) == before


def test_what_is_meant_for_clients_comes_as_it_is(runtime: IsolatedRuntime, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgument, match=r"^not that$") as caught:
        ask(runtime, "refuse")
    assert caught.value.field == "X"
    with pytest.raises(Internal, match=r"^expected a single response, got 2$"):
        ask(runtime, "twice")
    assert caplog.text == ""


def test_what_is_logged_there_is_in_the_log_here(runtime: IsolatedRuntime, caplog: pytest.LogCaptureFixture) -> None:
    ask(runtime, "tell")
    assert ("charonia.subject", logging.WARNING, "look here") in caplog.record_tuples


def test_it_leaves_signals_to_the_server(runtime: IsolatedRuntime) -> None:
    pid = pid_of(runtime)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert pid_of(runtime) == pid


@pytest.mark.parametrize(("do", "how"), [("exit", "it exited with 7"), ("crash", "it was ended by SIGSEGV")])
def test_a_process_that_ends_fails_what_it_executes(tmp_path: Path, do: str, how: str) -> None:
    runtime = opened(tmp_path)
    assert runtime.traits.process is not None
    assert not runtime.traits.process.lost
    with pytest.raises(Internal, match=f"instance 'subject_0', message: its process ended unexpectedly: {how}"):
        ask(runtime, do)
    assert runtime.traits.process.lost
    with pytest.raises(Internal, match=how):
        ask(runtime)
    runtime.close()


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        ("fails", InvalidArgument, "^no weights$"),
        ("exits", Internal, "^the process of instance 'subject_0' ended unexpectedly: it exited with 9$"),
    ],
)
def test_a_load_that_fails_leaves_nothing(tmp_path: Path, file: str, error: type[CharoniaError], message: str) -> None:
    (tmp_path / file).touch()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        opened(tmp_path)
    assert set(os.listdir("/proc/self/fd")) <= before, "files of earlier tests may close meanwhile"


# Where


def test_the_parameter_says_where(tmp_path: Path) -> None:
    loader = IsolatableLoader(ORIGIN)
    for value, here in (
        ({}, True),
        ({EXECUTION_PARAMETER: "thread"}, True),
        ({EXECUTION_PARAMETER: "isolated"}, False),
    ):
        made = loader.load(tmp_path, model_config(), InstancePlacement(), {"other": "1", **value})
        [pid] = [int(line.split()[0]) for line in (tmp_path / "loads").read_text().splitlines()]
        assert (pid == os.getpid()) == here
        assert "[('other', '1')]" in (tmp_path / "loads").read_text()
        (tmp_path / "loads").unlink()
        made.close()
    with pytest.raises(
        InvalidArgument, match="'EXECUTION' must be one of 'isolated', 'thread', got 'process'"
    ) as caught:
        loader.load(tmp_path, model_config(), InstancePlacement(), {EXECUTION_PARAMETER: "process"})
    assert caught.value.field == EXECUTION_PARAMETER


def test_a_config_is_completed_where_it_may_be_heavy(tmp_path: Path) -> None:
    made = LOADER.complete(tmp_path, {"name": "m"}, {"other": "1"})
    assert made["max_batch_size"] != os.getpid()
    assert made["parameters"] == {"other": "1"}
    assert IsolatableLoader(ORIGIN, ISOLATED).complete(tmp_path, {}, {})["max_batch_size"] == os.getpid()
    whole = {"input": [{}], "output": [{}]}
    assert LOADER.complete(tmp_path, whole, {}) == whole
    (tmp_path / "fails").touch()
    with pytest.raises(InvalidArgument, match=r"^no weights$"):
        LOADER.complete(tmp_path, {}, {})


# A model of them


@asynccontextmanager
async def serving(directory: Path, count: int = 1, restart_pause: str = "0.1") -> AsyncIterator[ClassicModel]:
    groups = {"instance_group": [{"count": count}], "dynamic_batching": {}}
    config = model_config(raw=groups, parameters={RESTART_PAUSE: restart_pause})
    model = ClassicModel(config, LOADER, directory)
    await model.load()
    try:
        yield model
    finally:
        await model.unload()


def request(do: str) -> InferRequest:
    return InferRequest(inputs={"DO": Tensor("DO", "BYTES", (1, 1), order(do))})


async def asked(model: ClassicModel, do: str = "process") -> InferResponse:
    async with asyncio.timeout(30):
        [response] = await answers(model, request(do))
    return response


async def pid_that_answers(model: ClassicModel) -> int:
    return int((await asked(model)).outputs[0].data[0, 0])


def processes(directory: Path) -> list[int]:
    return [int(line.split()[0]) for line in (directory / "loads").read_text().splitlines()]


def alive(*pids: int) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def restarts(model: ClassicModel) -> list[float]:
    return [reading.value for reading in model.readings() if reading.family == "charonia_instance_restarts_total"]


async def test_a_crash_fails_its_requests_and_the_next_ones_wait_for_nobody(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, restart_pause="0.3") as model:
        assert model.stats().ready
        with pytest.raises(Internal, match="its process ended unexpectedly: it was ended by SIGSEGV"):
            await asked(model, "crash")
        await until(lambda: not model.stats().ready)
        with pytest.raises(Unavailable, match="the model's instances have ended unexpectedly and are being restarted"):
            await asked(model)
        await until(lambda: model.stats().ready)
        first, second = processes(tmp_path)
        assert await pid_that_answers(model) == second
        assert restarts(model) == [1]
        failures = {
            reading.labels["reason"]: reading.value
            for reading in model.readings()
            if "request_failure" in reading.family
        }
        assert (failures["BACKEND"], failures["REJECTED"]) == (1, 1)
    assert not alive(first, second)


async def test_one_that_is_killed_while_it_is_idle_leaves_the_work_to_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path, count=2) as model:
        [one, _] = processes(tmp_path)
        os.kill(one, signal.SIGKILL)
        await until(lambda: len(processes(tmp_path)) == 3 or not model.stats().ready)
        assert model.stats().ready
        seen = {await pid_that_answers(model) for _ in range(20)}
        assert one not in seen
        await until(lambda: restarts(model) == [1])


async def test_it_tries_again_until_the_model_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as model:
        (tmp_path / "fails").touch()
        os.kill(processes(tmp_path)[0], signal.SIGKILL)
        await until(lambda: "did not start again: no weights" in caplog.text)
        assert not model.stats().ready
        (tmp_path / "fails").unlink()
        await until(lambda: model.stats().ready)
        assert await pid_that_answers(model) == processes(tmp_path)[-1]


async def test_unloading_ends_the_wait_for_another_try(tmp_path: Path) -> None:
    async with serving(tmp_path, restart_pause="3600") as model:
        os.kill(processes(tmp_path)[0], signal.SIGKILL)
        await until(lambda: not model.stats().ready)
    assert len(processes(tmp_path)) == 1


async def test_unloading_does_not_wait_for_another_one_that_hangs_as_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "_INTERRUPT_SECONDS", 0.05)
    held: list[int] = []

    def reached() -> bool:
        with suppress(OSError):  # nobody reads it yet
            held.append(os.open(tmp_path / "waits", os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    async with serving(tmp_path):
        os.mkfifo(tmp_path / "waits")
        os.kill(processes(tmp_path)[0], signal.SIGKILL)
        await until(reached)
    assert not (tmp_path / "closed").exists()
    os.close(held[0])
    await until((tmp_path / "closed").exists)
    await until(lambda: not alive(*processes(tmp_path)))


async def test_an_execution_that_takes_too_long_is_ended_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_pool, "CHECK_INTERVAL", 0.01)
    model, now = ClassicModel(model_config(parameters={EXECUTION_TIMEOUT: "60"}), LOADER, tmp_path), [0]
    await model.load()
    [only] = model._pool._instances
    only.execution_timer._clock = lambda: now[0]
    hanging = asyncio.create_task(asked(model, "hang"))
    await until((tmp_path / "hangs").exists)
    now[0] += 61 * 10**9
    with pytest.raises(
        Internal, match=r"its process was ended: the execution took longer than 60 s \(execution_timeout"
    ):
        await hanging
    await until(lambda: restarts(model) == [1])
    assert await pid_that_answers(model) == processes(tmp_path)[1]
    await model.unload()


async def test_unloading_ends_at_once_what_nobody_waits_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as model:
        hanging = asyncio.create_task(asked(model, "hang"))
        await until((tmp_path / "hangs").exists)
        hanging.cancel()
        await asyncio.wait({hanging})
    assert not alive(*processes(tmp_path))


async def test_unloading_kills_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_CLOSE_SECONDS", 0.05)
    async with serving(tmp_path) as model:
        hanging = asyncio.create_task(asked(model, "hang"))
        await until((tmp_path / "hangs").exists)
    with pytest.raises(Internal, match="was ended: the model was unloaded"):
        await hanging
    assert not alive(*processes(tmp_path))
