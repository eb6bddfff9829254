"""Python models in their processes: the calls of Triton's interface, failures, ends of all kinds."""

import asyncio
import errno
import gc
import json
import logging
import os
import signal
import weakref
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from charonia.classic_backends.batching.instance_pool import RESTART_PAUSE
from charonia.classic_backends.model import ClassicModel
from charonia.classic_backends.python.python_backend import PYTHON
from charonia.classic_backends.python_stub.backend_utils import ModelConfig
from charonia.core.errors import CharoniaError, ErrorCode, Internal, InvalidArgument, NotFound
from charonia.core.request_context import RequestContext

from ...waiting import until
from ..asking import answers
from .python_models import config, python_model, request, values, write_model

DOUBLE = """
def execute(self, requests):
    return [y(x(request) * 2) for request in requests]
"""


async def test_each_request_is_seen_as_it_was_made(tmp_path: Path) -> None:
    body = """
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        answers = []
        for r in requests:
            seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), json.loads(r.parameters()),
                    r.requested_output_names(), json.loads(self.args["model_config"])["name"], pb_utils.get_model_dir()]
            text = pb_utils.Tensor("T", np.array([json.dumps(seen)], dtype=object))
            answers.append(pb_utils.InferenceResponse([text], parameters={"a": 1, "b": "c", "d": True}))
        return answers
    """
    async with python_model(tmp_path, body) as model:
        [response] = await answers(model, request(1, outputs=("T",), timeout=5000000, key="value"))
        [text] = values(response)["T"]
    seen = ["id", 0, 0, 5000000, {"key": "value"}, ["T"], "model", str(tmp_path / "model" / "1")]
    assert text == str(seen).replace("'", '"').encode()
    assert response.parameters == {"a": 1, "b": "c", "d": True}


async def test_what_a_client_leaves_out_is_told_as_triton_tells_it(tmp_path: Path) -> None:
    """All outputs are requested where none is named, and a sequence's fields need no sequence batcher."""
    body = """
    def execute(self, requests):
        [r] = requests
        told = json.dumps([r.requested_output_names(), r.correlation_id(), r.flags(), json.loads(r.parameters())])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([told]))])]
    """
    async with python_model(tmp_path, body) as model:
        for parameters, told in (
            ({"k": 1}, [0, 0, {"k": 1}]),
            ({"sequence_id": 7, "sequence_start": True}, [7, 1, {}]),
            ({"sequence_id": "a", "sequence_start": True, "sequence_end": True}, ["a", 3, {}]),
        ):
            [response] = await answers(model, request(1, **parameters))
            assert json.loads(values(response)["T"][0]) == [["Y", "T"], *told]


async def test_an_output_of_another_type_than_the_configs_goes_out_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full(1, x(r)[0] / 2))]) for r in requests]
    """
    async with python_model(tmp_path, body) as model:
        for number in (1, 3):
            [response] = await answers(model, request(number))
            [output] = response.outputs
            assert (output.datatype, output.data.tolist()) == ("FP64", [number / 2])
    warned = "model 'model' made output 'Y' of type float64, not INT32, as its config says: clients get what it made"
    assert caplog.messages.count(warned) == 1


async def test_the_instance_is_told_where_it_is(tmp_path: Path) -> None:
    body = """
    def initialize(self, args):
        self.args = {name: args[name] for name in sorted(args) if name != "model_config"}

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([json.dumps(self.args)]))])]
    """
    async with python_model(tmp_path, body) as model:
        [response] = await answers(model, request(1))
    assert eval(values(response)["T"][0]) == {
        "model_instance_device_id": "0",
        "model_instance_kind": "CPU",
        "model_instance_name": "model_0_0",
        "model_name": "model",
        "model_repository": str(tmp_path / "model"),
        "model_version": "1",
    }


async def test_tensors_about_a_whole_batch_are_left_out(tmp_path: Path) -> None:
    sizes = {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["N"], "data_type": "TYPE_INT32", "source_input": ["X"]}
    whole = {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["Y"], "source_input": ["X"]}
    raw = {"batch_input": [sizes], "batch_output": [whole], "input": [{"name": "X"}]}
    async with python_model(tmp_path, DOUBLE, **raw) as model:
        [response] = await answers(model, request(3))
    assert values(response)["Y"] == [6]


async def test_modules_beside_the_model_are_found_both_ways(tmp_path: Path) -> None:
    version = write_model(tmp_path, "")
    (version / "beside.py").write_text("NUMBER = 3\n")
    (version.parent / "above.py").write_text("NUMBER = 4\n")
    body = """
    from .beside import NUMBER as ONE
    import beside, above

    def execute(self, requests):
        return [y([self.ONE, self.beside.NUMBER, self.above.NUMBER]) for _ in requests]
    """
    async with python_model(tmp_path, body) as model:
        [response] = await answers(model, request(1))
    assert values(response) == {"Y": [3, 3, 4]}


async def test_requests_share_a_batch_and_each_has_its_own_answer(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        time.sleep(0.05)
        wrong = pb_utils.InferenceResponse(error=pb_utils.TritonError("no ones", pb_utils.TritonError.NOT_FOUND))
        return [wrong if (x(r) == 1).all() else y([len(requests)], ) for r in requests]
    """
    settings = {"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 100_000}}
    async with python_model(tmp_path, body, **settings) as model:

        async def ask(number: int) -> object:
            whole = request(number)
            tensor = whole.inputs["X"]
            data = tensor.data.reshape(1, 1)
            whole.inputs["X"] = type(tensor)("X", "INT32", data.shape, data)  # type: ignore[index]
            try:
                [response] = await answers(model, whole)
            except CharoniaError as error:
                return error
            return values(response)["Y"]

        results = await asyncio.gather(*(ask(number) for number in (0, 1, 2, 3)))
        statistics = model.statistics()
    assert [results[index] for index in (0, 2, 3)] == [[4], [4], [4]]
    assert isinstance(results[1], NotFound)
    assert str(results[1]) == "no ones"
    assert (statistics.execution_count, statistics.inference_count, statistics.inference.fail.count) == (1, 3, 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "return None if requests else 0",
            "Expected an 'InferenceResponse' object in the execute function return list",
        ),
        ("return 3", "Expected a list in the execute return, found type 'int'."),
        ("return [3]", "Expected an 'InferenceResponse' object in the execute function return list, found type 'int'."),
        ("return []", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
        ("raise ValueError('boom')", "message: ValueError: boom\n\nAt:\n"),
        ("sys.exit(3)", "message: SystemExit: 3"),
        ("return [pb_utils.InferenceResponse([3])]", "An output must be a Tensor"),
        ("return [y(1, parameters={'a': 1.5})]", "Expect parameters values to have type bool/int/str"),
        (
            "return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.ones(1, np.uint16))])]",
            "made output 'Y' of type uint16, not INT32",
        ),
    ],
)
async def test_what_goes_wrong_fails_the_batch_and_not_the_instance(tmp_path: Path, body: str, text: str) -> None:
    whole = f"""
    def execute(self, requests):
        if (x(requests[0]) == 7).all():
            return [y(7)]
        {body}
    """
    async with python_model(tmp_path, whole) as model:
        with pytest.raises(Internal) as caught:
            await answers(model, request(1))
        assert text in str(caught.value)
        [response] = await answers(model, request(7))
    assert values(response) == {"Y": [7]}


async def test_coroutines_run_in_one_loop_and_one_batch_at_a_time(tmp_path: Path) -> None:
    body = """
    loops = set()

    async def execute(self, requests):
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return [y(len(self.loops)) for r in requests]
    """
    async with python_model(tmp_path, body) as model:
        got = [values(response) for _ in range(3) for response in await answers(model, request(1))]
    assert got == [{"Y": [1]}] * 3


async def test_a_sender_answers_after_execute_has_returned(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.answer, args=(r.get_response_sender(), x(r).copy())).start()

    def answer(self, sender, value):
        time.sleep(0.05)
        errors = []
        try:
            sender.send(flags=FINAL)
        except pb_utils.TritonModelException as error:
            errors.append(str(error))
        sender.send(y(value), flags=FINAL)
        for again in (lambda: sender.send(y(value)), lambda: sender.send(flags=3), lambda: sender.send()):
            try:
                again()
            except pb_utils.TritonModelException as error:
                errors.append(str(error))
        print(errors)
    """
    async with python_model(tmp_path, body, instances=1) as model:
        several = await asyncio.gather(*(answers(model, request(number)) for number in range(4)))
    assert [values(response)["Y"] for [response] in several] == [[0], [1], [2], [3]]


async def test_a_decoupled_model_sends_any_number_of_responses_from_threads(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.answer, args=(r.get_response_sender(), int(x(r)[0]))).start()

    def answer(self, sender, count):
        for number in range(count):
            sender.send(y(number))
        sender.send(flags=FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True) as model:
        several = await asyncio.gather(*(answers(model, request(number)) for number in (0, 3, 700)))
        statistics = model.statistics()
    assert [[values(response)["Y"] for response in responses] for responses in several] == [
        [[number] for number in range(count)] for count in (0, 3, 700)
    ]
    assert statistics.inference.success.count == 3


async def test_decoupled_coroutines_overlap(tmp_path: Path) -> None:
    body = """
    waiting = {}

    async def execute(self, requests):
        for r in requests:
            number = int(x(r)[0])
            event = self.waiting.setdefault(number // 2, asyncio.Event())
            if number % 2:
                event.set()
            await event.wait()
            r.get_response_sender().send(y(number), flags=FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True) as model:
        several = await asyncio.gather(*(answers(model, request(number)) for number in (0, 2, 1, 3)))
    assert [values(response)["Y"] for [response] in several] == [[0], [2], [1], [3]]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "def execute(self, requests):\n    return [y(1)]",
            "is using the decoupled mode and the execute function must",
        ),
        ("async def execute(self, requests):\n    raise KeyError('k')", "message: KeyError: 'k'"),
        ("def execute(self, requests):\n    pass", "The model let go of the request without a final response."),
    ],
)
async def test_a_decoupled_request_that_is_not_answered_is_told(tmp_path: Path, body: str, text: str) -> None:
    async with python_model(tmp_path, body, decoupled=True) as model:
        with pytest.raises(Internal) as caught:
            await answers(model, request(1))
    assert text in str(caught.value)


async def test_a_stream_that_is_left_is_cancelled_in_the_model(tmp_path: Path) -> None:
    body = """
    ended = 0

    def execute(self, requests):
        for r in requests:
            if x(r)[0] == 0:
                r.get_response_sender().send(y(TritonPythonModel.ended), flags=FINAL)
            else:
                threading.Thread(target=self.answer, args=(r.get_response_sender(),)).start()

    def answer(self, sender):
        while not sender.is_cancelled():
            sender.send(y(1))
            time.sleep(0.001)
        error = pb_utils.TritonError("left", pb_utils.TritonError.CANCELLED)
        sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
        TritonPythonModel.ended += 1
    """
    async with python_model(tmp_path, body, decoupled=True) as model:
        for _ in range(3):
            async with aclosing(model.infer(request(1), RequestContext("test"))) as responses:  # type: ignore[type-var]
                await anext(responses)

        async def ended() -> int:
            [response] = await answers(model, request(0))
            [number] = values(response)["Y"]
            return int(number)

        async with asyncio.timeout(30):
            while await ended() < 3:
                pass


async def test_an_unread_stream_holds_up_its_sender_alone(tmp_path: Path) -> None:
    body = """
    sent = 0

    def execute(self, requests):
        for r in requests:
            if x(r)[0] == 0:
                r.get_response_sender().send(y(self.sent), flags=FINAL)
            else:
                threading.Thread(target=self.answer, args=(r.get_response_sender(), int(x(r)[0]))).start()

    def answer(self, sender, count):
        for number in range(count):
            sender.send(y(number))
            self.sent += 1
        sender.send(flags=FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True) as model:
        responses = model.infer(request(3000), RequestContext("test"))
        await anext(responses)

        async def sent() -> int:
            [response] = await answers(model, request(0))
            return int(values(response)["Y"][0])

        before = -1
        while before != (now := await sent()):
            before = now
            await asyncio.sleep(0.1)
        assert 256 <= now < 3000
        assert len([each async for each in responses]) == 2999


async def test_errors_have_their_codes(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        error = pb_utils.TritonError("it failed", int(x(requests[0])[0]))
        return [pb_utils.InferenceResponse(error=error) for r in requests]
    """
    codes = [*ErrorCode][:8]
    async with python_model(tmp_path, body) as model:
        for number, code in enumerate(codes):
            with pytest.raises(CharoniaError, match="it failed") as caught:
                await answers(model, request(number))
            assert caught.value.code is code


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no weights')", "ValueError: no weights\n\nAt:\n  {file}(15): initialize\n"),
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'\n\nAt:\n  {file}(15): initialize\n",
        ),
        ("os._exit(3)", "its process ended unexpectedly: it exited with 3"),
        ("os.kill(os.getpid(), 11)", "its process ended unexpectedly: it was ended by SIGSEGV"),
    ],
)
async def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, body: str, text: str) -> None:
    body = f"def initialize(self, args): {body}\n{DOUBLE}"
    with pytest.raises(InvalidArgument) as caught:
        async with python_model(tmp_path, body):
            pass
    file = tmp_path / "model" / "1" / "model.py"
    assert str(caught.value) == "Failed to initialize model instance 'model_0_0': " + text.format(file=file)


async def test_coroutines_go_on_when_execute_has_returned(tmp_path: Path) -> None:
    body = """
    ticks = 0

    async def tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0)

    async def execute(self, requests):
        if not self.ticks:
            self.ticking = asyncio.create_task(self.tick())
            await asyncio.sleep(0)
        assert sys.argv == [""]
        return [y(self.ticks) for r in requests]
    """
    async with python_model(tmp_path, body) as model:

        async def ticks() -> int:
            [response] = await answers(model, request(1))
            return int(values(response)["Y"][0])

        first = await ticks()
        assert await ticks() > first + 1


@pytest.mark.parametrize("times", [5, pytest.param(1000, marks=pytest.mark.proof)])
async def test_a_pool_of_processes_maps_beside_threads_that_talk_to_the_server(tmp_path: Path, times: int) -> None:
    body = """
    def initialize(self, args):
        threading.Thread(target=self.talk, daemon=True).start()

    def talk(self):
        family = pb_utils.MetricFamily("talks", "", pb_utils.MetricFamily.GAUGE)
        gauge = family.Metric()
        while True:
            gauge.set(1)
            pb_utils.Logger.log_verbose("x" * 5000)
            time.sleep(0)

    def execute(self, requests):
        from multiprocessing import Pool
        with Pool(2) as pool:
            return [y(pool.map(abs, [-1, 2, -3])) for r in requests]
    """
    async with python_model(tmp_path, body) as model:
        for _ in range(times):
            assert values((await answers(model, request(0)))[0]) == {"Y": [1, 2, 3]}


async def test_a_process_that_a_model_spawns_can_import_the_model(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        from multiprocessing import get_context
        with get_context("spawn").Pool(1) as pool:
            return [y(pool.apply(TritonPythonModel.in_child, (4,))) for r in requests]

    @staticmethod
    def in_child(number):
        asked = pb_utils.InferenceRequest(model_name="m", inputs=[pb_utils.Tensor("X", np.arange(number))],
                                          requested_output_names=[])
        return [number, "was forked" in asked.exec().error().message()]
    """
    async with python_model(tmp_path, body) as model:
        assert values((await answers(model, request(0)))[0]) == {"Y": [4, 1]}


async def test_what_a_model_forks_neither_answers_nor_releases_what_is_the_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = """
    def execute(self, requests):
        kind = int(x(requests[0])[0])
        pid = os.fork()
        if pid == 0:
            if kind == 1:
                return [y(-1)]
            if kind == 2:
                sys.exit(7)
            if kind == 3:
                raise KeyError("in the copy")
            pb_utils.Logger.log_info("from the copy")
            answer = pb_utils.InferenceRequest(model_name="m", inputs=requests[0].inputs(),
                                               requested_output_names=[]).exec()
            try:
                requests[0].get_response_sender().send(y(2))
            except pb_utils.TritonModelException as error:
                os._exit("was forked" in str(error) and "was forked" in answer.error().message())
        return [y(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for r in requests]
    """
    caplog.set_level(logging.INFO)
    async with python_model(tmp_path, body) as model:
        codes = [values((await answers(model, request(kind)))[0])["Y"] for kind in (1, 2, 3, 4)]
        await until(lambda: "from the copy" in caplog.text)
    assert codes == [[0], [7], [1], [1]]


async def test_a_coroutine_that_forks_leaves_its_loop_to_the_model(tmp_path: Path) -> None:
    body = """
    async def execute(self, requests):
        pid = os.fork()
        if pid:
            status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, pid, 0)
            for r in requests:
                r.get_response_sender().send(y(os.waitstatus_to_exitcode(status[1])), flags=FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True) as model:
        assert [values(each) for each in await answers(model, request(1))] == [{"Y": [0]}]


async def test_what_a_model_started_ends_with_its_instance(tmp_path: Path) -> None:
    body = """
    def initialize(self, args):
        import subprocess
        self.started, ended = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"])
        ended.terminate()
        assert ended.wait(60) == -15

    def execute(self, requests):
        if x(requests[0])[0]:
            os.kill(os.getpid(), 9)
        return [y(self.started.pid) for r in requests]
    """

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    async with python_model(tmp_path, body, parameters={RESTART_PAUSE: "0.01"}) as model:
        [first] = values((await answers(model, request(0)))[0])["Y"]
        with pytest.raises(Internal):
            await answers(model, request(1))
        await until(lambda: not runs(first))
        await until(lambda: model.stats().ready and restarts(model) == 1)
        [second] = values((await answers(model, request(0)))[0])["Y"]
        assert runs(second)
    await until(lambda: not runs(second))


async def test_an_error_text_of_any_kind_does_no_harm(tmp_path: Path) -> None:
    body = """
    TEXTS = {1: "half \\ud800 of one", 2: "x" * (1 << 24)}

    class Unprintable(Exception):
        __str__ = lambda self: 1

    def execute(self, requests):
        kind = int(x(requests[0])[0])
        if kind > 2:
            raise self.Unprintable
        if kind > 0:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(self.TEXTS[kind])) for r in requests]
        if kind < 0:
            raise ValueError(self.TEXTS[-kind])
        return [y(os.getpid()) for r in requests]
    """
    half, cut = "half ? of one", "... (cut after 65536 of "
    expected = {1: half, 2: f"x{cut}16777216 bytes)", 3: "Unprintable: (its text cannot be made)"}
    expected |= {-1: f"ValueError: {half}", -2: f"x{cut}16777228 bytes)"}
    async with python_model(tmp_path, body) as model:
        before = await answers(model, request(0))
        for kind, text in expected.items():
            with pytest.raises(Internal) as caught:
                await answers(model, request(kind))
            assert text in caught.value.message
            assert len(caught.value.message) < 70_000
        assert values((await answers(model, request(0)))[0]) == values(before[0])


async def test_memory_that_is_exhausted_is_told_and_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    def initialize(self, args):
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))

    def execute(self, requests):
        return [y(np.zeros(x(r)[0], np.int32)) for r in requests]
    """

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "")

    grow = "Failed to increase the shared memory pool size to"
    async with python_model(tmp_path, body) as model:
        for _ in range(3):
            with pytest.raises(Internal, match=f"{grow} 4194304 bytes: File too large"):
                await answers(model, request(1 << 20))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(Internal, match=f"{grow} 2097152 bytes: No space left on device"):
                await answers(model, request(*[1] * (1 << 19)))
            with pytest.raises(Internal, match=f"initialize model instance 'model_0_0': {grow} 1048576 bytes: No sp"):
                async with python_model(tmp_path, body):
                    pass
        [response] = await answers(model, request(1 << 17))
    assert len(values(response)["Y"]) == 1 << 17


async def test_what_finalize_raises_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with python_model(tmp_path, f"{DOUBLE}\ndef finalize(self): raise ValueError('not closed')"):
        pass
    assert "model_0_0: ValueError: not closed" in caplog.messages


async def test_a_process_that_dies_fails_its_requests_and_is_replaced(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        if x(requests[0])[0] == 1:
            os.kill(os.getpid(), 9)
        if x(requests[0])[0] == 2:
            time.sleep(60)
        return [y(os.getpid()) for r in requests]
    """
    async with python_model(tmp_path, body) as model:

        async def pid() -> int:
            while True:
                try:
                    [response] = await answers(model, request(0))
                except CharoniaError:
                    await asyncio.sleep(0.05)
                    continue
                [number] = values(response)["Y"]
                return int(number)

        first = await pid()
        with pytest.raises(Internal, match=r"Stub process 'model_0_0' is not healthy\."):
            await answers(model, request(1))
        second = await pid()
        hung = asyncio.create_task(answers(model, request(2)))
        await asyncio.sleep(0.1)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(Internal, match=r"Stub process 'model_0_0' is not healthy\."):
            await hung
        assert await pid() not in (first, second)


async def test_the_pause_before_a_restart_begins_anew_after_a_served_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"""
    def initialize(self, args):
        with open({str(tmp_path / "pids")!r}, "a") as file:
            print(os.getpid(), file=file)

    def execute(self, requests):
        return [y(1) for r in requests]
    """
    async with python_model(tmp_path, body, parameters={RESTART_PAUSE: "0.01"}) as model:
        for number, serve in enumerate((False, False, True)):
            await until(lambda number=number: model.stats().ready and restarts(model) == number)
            if serve:
                await answers(model, request(1))
            os.kill(int((tmp_path / "pids").read_text().split()[-1]), signal.SIGKILL)
        await until(lambda: restarts(model) == 3)
    pauses = [message.rpartition(" in ")[2] for message in caplog.messages if "has ended unexpectedly" in message]
    assert pauses == ["0.01 s", "0.02 s", "0.01 s"]


def restarts(model: ClassicModel) -> float:
    return next(reading.value for reading in model.readings() if reading.family == "charonia_instance_restarts_total")


async def test_a_hung_execution_is_ended_in_time(tmp_path: Path) -> None:
    body = "def execute(self, requests): time.sleep(60)"
    async with python_model(tmp_path, body, parameters={"execution_timeout_secs": "0.2"}) as model:
        with pytest.raises(Internal, match=r"its process was ended: the execution took longer than 0\.2 s"):
            await answers(model, request(1))


async def test_what_it_prints_and_logs_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = """
    def execute(self, requests):
        print("printed")
        print("on stderr", file=sys.stderr)
        os.write(1, b"from below\\n")
        print("a bell \\a\\tand \\x1b[31mred\\r" + "z" * 20000)
        pb_utils.Logger.log_info("two\\nlines \\x1b")
        pb_utils.Logger.log_warn("careful")
        pb_utils.Logger.log("ordinary")
        return [y(1) for r in requests]

    def finalize(self):
        print("finalized")
    """
    caplog.set_level(logging.INFO)
    async with python_model(tmp_path, body) as model:
        await answers(model, request(1))
    await until(lambda: "finalized" in caplog.text)
    cut = "a bell \\x07\tand \\x1b[31mred\\x0d" + "z" * 16362 + "... (3638 bytes more)"
    for text in ("printed", "on stderr", "from below", "finalized", cut):
        assert f"model_0_0: {text}" in caplog.messages
    logged = [(record.levelname, record.getMessage()) for record in caplog.records if "model.py:" in record.message]
    assert [(level, text.rpartition(": ")[2]) for level, text in logged] == [
        ("INFO", "two"),
        ("INFO", "lines \\x1b"),
        ("WARNING", "careful"),
        ("INFO", "ordinary"),
    ]


def test_a_config_is_completed_by_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = """
    @staticmethod
    def auto_complete_config(config):
        pb_utils.Logger.log_warn("completing")
        asked = pb_utils.InferenceRequest(model_name="other", inputs=[], requested_output_names=[])
        for call in (lambda: pb_utils.is_model_ready("other"), asked.exec):
            try:
                call()
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_warn(str(error))
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests): pass
    """
    version = write_model(tmp_path, body)
    completed = PYTHON.complete(version, {"name": "model"}, {})
    assert completed == {
        "name": "model",
        "input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [-1]}],
        "output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [-1]}],
        "max_batch_size": 4,
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }
    refusals = [f"{name} cannot be called while the model's config is completed" for name in ("is_model_ready", "exec")]
    assert [message.partition(": ")[2].partition(": ")[2] for message in caplog.messages] == ["completing", *refusals]
    with pytest.raises(InvalidArgument, match=r"the model expects dims \[-1\] but the model configuration specifies"):
        PYTHON.complete(version, {"name": "m", "input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [2]}]}, {})
    with pytest.raises(InvalidArgument, match="configuration specified max_batch_size 8"):
        PYTHON.complete(version, {"name": "model", "max_batch_size": 8}, {})


def test_a_tensor_that_the_config_declares_in_part_is_completed() -> None:
    completed = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}
    for declared in (
        {"name": "X", "data_type": "TYPE_INVALID", "dims": []},
        {"name": "X"},
        {"name": "X", "data_type": "TYPE_FP32", "dims": []},
        {"name": "X", "data_type": "TYPE_INVALID", "dims": ["4"]},
    ):
        made = ModelConfig({"name": "m", "input": [dict(declared)], "output": [{**declared, "label_filename": "l"}]})
        made.add_input({**completed, "optional": True})
        made.add_output(completed)
        assert made.as_dict()["input"] == [{**completed, "optional": True}]
        assert made.as_dict()["output"] == [{**completed, "label_filename": "l"}]
    for declared, text in (
        ({"name": "X", "dims": [5]}, r"the model expects dims \[4\] but the model configuration specifies dims \[5\]"),
        ({"name": "X", "data_type": "TYPE_INT32"}, "configuration expects datatype TYPE_INT32 for input 'X'"),
        (
            {"name": "X", "optional": False},
            "expects optional True but the model config",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            ModelConfig({"name": "m", "input": [declared]}).add_input({**completed, "optional": True})


def test_another_scheduler_of_the_config_is_not_passed_over() -> None:
    for scheduler in ("sequence_batching", "ensemble_scheduling"):
        with pytest.raises(ValueError, match=f"specified scheduling_choice as '{scheduler}'"):
            ModelConfig({"name": "m", scheduler: {}}).set_dynamic_batching()
    made = ModelConfig({"name": "m", "dynamic_batching": {"priority_levels": 2}})
    made.set_dynamic_batching()
    assert made.as_dict()["dynamic_batching"] == {"priority_levels": 2}


async def test_a_model_without_its_file_is_refused(tmp_path: Path) -> None:
    (write_model(tmp_path, DOUBLE) / "model.py").unlink()
    with pytest.raises(InvalidArgument, match="there is no file"):
        PYTHON.complete(tmp_path / "model" / "1", config().raw, {})


async def test_nothing_waits_for_a_collector_of_garbage(tmp_path: Path) -> None:
    """Neither a request's tensors nor its error: memory of other processes may lie under them."""
    body = """
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            sender.send(y(x(r)))
            if x(r)[0] == 7:
                os._exit(1)
            sender.send(flags=FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True, parameters={RESTART_PAUSE: "0"}) as model:
        await answers(model, request(1))
        gc.collect()
        gc.disable()
        try:
            for number in (2, 7):
                asked = request(number)
                held = [weakref.ref(asked.inputs["X"].data)]
                with suppress(Internal):
                    async with aclosing(model.infer(asked, RequestContext("test"))) as responses:
                        async for response in responses:
                            held.append(weakref.ref(response.outputs[0].data))
                            del response
                del asked, responses
                await until(lambda held=held: [each for each in held if each() is not None] == [])
        finally:
            gc.enable()
