"""Running a pipeline: what its code asks, yields and raises, and what becomes of code that does not want to end."""

import asyncio
import re
from contextlib import aclosing
from pathlib import Path

import pytest

from charonia.core.errors import CharoniaError, Internal, InvalidArgument, RequestTimeout, Unavailable
from charonia.core.request import InferRequest
from charonia.core.request_context import ExecutionTimes, RequestContext
from charonia.ensembles.lookup import MAX_DEPTH

from ..waiting import until
from .pipelines import Models, answers, loaded, module_of, request

AT = "(glue/1/pipeline.py:4)"


async def test_requests_of_other_models_are_the_clients(tmp_path: Path) -> None:
    code = """
    async def run(request, lookup):
        await lookup("text", inherit=False).infer({"IN": "a"})
        await lookup("text", inherit=["temperature"]).infer({"IN": "a", "stop": ["b"], "seed": 7})
        await lookup("count").infer({"UPTO": 1, "timeout": 5, "stream": None}, outputs=["N"])
        async for _ in lookup("count").stream({"UPTO": request["X"]}):
            pass
        yield {"U": request.text("T")}
    """
    models = Models()
    asked = request("x", 3, temperature=0.5, top_k=4, priority=2, timeout=60_000_000)
    assert await answers(await loaded(tmp_path, code, models), asked) == [b"x"]
    bare, some, once, all_of_it = [each for _, each in models.requests]
    assert {each.id for each in (bare, some, once, all_of_it)} == {"id"}
    assert bare.parameters.keys() == {"priority", "timeout"}
    assert some.parameters.keys() == {"priority", "timeout", "temperature", "seed"}
    assert b'"stop": ["b"]' in some.inputs["sampling_parameters"].scalar
    assert b'"temperature": 0.5' in some.inputs["sampling_parameters"].scalar
    assert (once.parameters["timeout"], once.outputs, "stream" in once.inputs) == (5, ("N",), False)
    assert 0 < all_of_it.parameters["timeout"] < 60_000_000, "what is left of it"
    assert (all_of_it.parameters["top_k"], all_of_it.inputs["stream"].scalar) == (4, True)


async def test_no_model_is_asked_when_the_time_is_over(tmp_path: Path) -> None:
    models = Models()
    glue = await loaded(
        tmp_path, "async def run(r, lookup):\n    return await lookup('text').infer({'IN': 'a'})", models
    )
    context = RequestContext("test", arrived_at=0.0)
    with pytest.raises(RequestTimeout):
        await anext(glue.infer(request(timeout=1000), context))
    assert models.requests == []


async def test_the_code_may_try_again_and_elsewhere(tmp_path: Path) -> None:
    code = """
    from charonia.ensembles import CharoniaError

    async def run(request, lookup):
        for name in ("down", "down", "text"):
            try:
                answer = await lookup(name).infer({"IN": request["X"] if name == "down" else "fine"})
            except CharoniaError as error:
                yield {"U": error.code}
            else:
                yield {"U": answer["OUT"]}
    """
    assert await answers(await loaded(tmp_path, code)) == [b"UNAVAILABLE", b"UNAVAILABLE", b"fine"]


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ('await lookup("down").infer({"IN": 1})', Unavailable, "in pipeline 'glue', 'down' is down"),
        ('raise InvalidArgument("no")', InvalidArgument, "no"),
        ('{}["k"]', Internal, f"pipeline 'glue' has failed {AT}: KeyError: 'k'"),
        (
            "helper.fail()",
            Internal,
            "pipeline 'glue' has failed (glue/1/helper.py:2): ZeroDivisionError: division by zero",
        ),
        ("raise SystemExit(3)", Internal, f"pipeline 'glue' has failed {AT}: SystemExit: 3"),
        ("raise asyncio.CancelledError", Internal, f"pipeline 'glue' has failed {AT}: CancelledError: "),
        ('lookup("other")', Internal, "pipeline 'glue' asks model 'other', which its parameter 'models' does not name"),
        (
            'await asyncio.gather(lookup("down").infer({"IN": 1}), asyncio.sleep(60))',
            Unavailable,
            "in pipeline 'glue', 'down' is down",
        ),
        (
            'await lookup("text").infer({"IN": 1})',
            InvalidArgument,
            "in pipeline 'glue', input 'IN' of model 'text' must be strings, got int",
        ),
        (
            'await lookup("text").infer({"in": {}})',
            InvalidArgument,
            "in pipeline 'glue', model 'text' has no input 'in', only ['IN', 'sampling_parameters'], "
            "and a parameter is a plain value",
        ),
        (
            'await lookup("count").infer({"UPTO": 2})',
            Internal,
            "model 'count' has answered more than once: ask it by 'stream'",
        ),
        ('await lookup("count").infer({"UPTO": 0})', Internal, "model 'count' has not answered"),
        ("yield 3", Internal, f"pipeline 'glue' has yielded int, not its outputs by name {AT}"),
        ("yield {}", Internal, f"pipeline 'glue' has yielded nothing {AT}"),
        ('yield {"Z": 1}', Internal, f"pipeline 'glue' has yielded 'Z' {AT}; its outputs are 'Y', 'U'"),
        ('yield {"Y": "1"}', Internal, f"pipeline 'glue': output 'Y' must be INT32, got '1' {AT}"),
        ('yield {"Y": [1, 2]}', Internal, f"pipeline 'glue': output 'Y' must have shape [1], got [2] {AT}"),
    ],
)  # fmt: skip
async def test_failures_say_what_and_where(tmp_path: Path, body: str, kind: type[CharoniaError], text: str) -> None:
    head = "import asyncio; from . import helper; from charonia.ensembles import InvalidArgument"
    code = f"{head}\n\nasync def run(request, lookup):\n    {body}\n    yield\n"
    models = Models()
    with pytest.raises(CharoniaError) as caught:
        await answers(await loaded(tmp_path, code, models, helper="def fail():\n    1 / 0\n"))
    assert (type(caught.value), caught.value.message) == (kind, text)
    assert models.open == 0


async def test_without_decoupled_there_is_one_answer(tmp_path: Path) -> None:
    async def failure(code: str) -> str:
        with pytest.raises(Internal) as caught:
            await answers(await loaded(tmp_path, f"async def run(request, lookup):\n    {code}", decoupled=False))
        return caught.value.message

    one = await loaded(tmp_path, "async def run(request, lookup):\n    return {'Y': 7}", decoupled=False)
    async with aclosing(one.infer(request(), RequestContext("test"))) as responses:
        assert [(response.outputs[0].scalar, response.final) async for response in responses] == [(7, True)]
    assert (one.statistics().inference.success.count, one.stats().success) == (1, 1)
    assert await failure("return; yield") == "pipeline 'glue' has not yielded an answer"
    twice = "pipeline 'glue' has yielded twice (glue/1/pipeline.py:2), and its config is not decoupled"
    assert await failure("yield {'Y': 1}; yield {'Y': 2}") == twice
    assert await failure("return {'U': 1}") == "pipeline 'glue' has yielded 'U'; its outputs are 'Y'"
    assert await failure("return None") == "pipeline 'glue' has yielded NoneType, not its outputs by name"


async def test_only_wanted_outputs_leave(tmp_path: Path) -> None:
    code = """
    async def run(request, lookup):
        yield {"Y": 1, "U": "a"}
        yield {"Y": 2}
        async for each in lookup("text").stream({"IN": "b"}):
            yield {"U": each["OUT"]}
    """
    glue = await loaded(tmp_path, code)
    asked = InferRequest("id", request().inputs, ("U",))
    async with aclosing(glue.infer(asked, RequestContext("test"))) as responses:
        found = [[tensor.scalar for tensor in response.outputs] async for response in responses]
    assert found == [[b"a"], [b"b"]]


async def test_a_models_response_passes_as_far_as_there_are_outputs_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    glue = await loaded(tmp_path, "async def run(r, lookup):\n    yield await lookup('text').infer({'IN': 'a'})\n")
    with pytest.raises(Internal, match=f"has yielded nothing {re.escape(AT[:-2])}2"):
        await answers(glue)
    monkeypatch.setattr("tests.ensembles.pipelines.OUT", "U")
    async with aclosing(glue.infer(request(), RequestContext("test"))) as responses:
        assert [(response.outputs[0].scalar, response.parameters) async for response in responses] == [
            (b"a", {"shouted": False})
        ]


async def test_leaving_runs_what_the_code_has_to_clean_up(tmp_path: Path) -> None:
    code = """
    left = []

    async def run(request, lookup):
        try:
            async with lookup("count").stream({"UPTO": 1000}) as numbers:
                async for each in numbers:
                    yield {"Y": each["N"]}
        finally:
            await lookup("text").infer({"IN": "goodbye"})
    """
    models = Models()
    glue = await loaded(tmp_path, code, models)
    responses = glue.infer(request(), RequestContext("test"))
    assert (await anext(responses)).outputs[0].scalar == 0
    assert models.open == 1
    await responses.aclose()
    assert (models.open, [name for name, _ in models.requests]) == (0, ["count", "text"])
    assert glue.stats().cancelled == 1


async def test_a_stream_that_a_loop_left_is_closed_at_once(tmp_path: Path) -> None:
    code = """
    import asyncio

    async def run(request, lookup):
        async for each in lookup("count").stream({"UPTO": 1000}):
            break
        yield {"Y": each["N"]}
        await asyncio.Event().wait()
    """
    models = Models()
    responses = (await loaded(tmp_path, code, models)).infer(request(), RequestContext("test"))
    async with aclosing(responses):
        await anext(responses)
        await until(lambda: models.open == 0)


async def test_streams_and_tasks_that_are_held_on_to_end_with_the_request(tmp_path: Path) -> None:
    code = """
    import asyncio

    held = []

    async def read(stream):
        async for each in stream:
            await asyncio.sleep(0)

    async def run(request, lookup):
        held.append(lookup("count").stream({"UPTO": 1000}))
        await anext(held[0])
        held.append(asyncio.create_task(read(lookup("count").stream({"UPTO": 10**9}))))
        await asyncio.sleep(0.01)
        held.append(lookup)
        yield {"Y": 1}
    """
    models = Models()
    glue = await loaded(tmp_path, code, models)
    assert await answers(glue) == [1]
    assert models.open == 0
    stream, task, lookup = module_of(glue).held
    await until(task.done)
    assert task.cancelled()
    for late in (stream.__anext__(), lookup("text").infer({"IN": "late"})):
        with pytest.raises(asyncio.CancelledError, match="the pipeline's request has ended"):
            await late
    assert len(models.requests) == 2


@pytest.mark.parametrize(
    "code",
    [
        """
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            yield {"Y": 2}
    """,
        """
    try:
        await asyncio.sleep(3600)
    finally:
        yield {"Y": 2}
    """,
    ],
)
async def test_code_that_yields_after_its_end_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    head = "import asyncio\nasync def run(request, lookup):\n    yield {'Y': 1}\n"
    responses = (await loaded(tmp_path, head + code)).infer(request(), RequestContext("test"))
    assert (await anext(responses)).outputs[0].scalar == 1
    await asyncio.sleep(0)
    await responses.aclose()
    assert "does not end" not in caplog.text


async def test_code_that_does_not_end_is_left_to_itself_and_asks_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.ensembles.pipeline_model._PATIENCE", 0.05)
    code = """
    import asyncio

    over = False

    async def run(request, lookup):
        yield {"Y": 1}
        while not over:
            try:
                async for each in lookup("count").stream({"UPTO": 10**9}):
                    pass
            except BaseException:
                pass
    """
    models = Models()
    glue = await loaded(tmp_path, code, models)
    responses = glue.infer(request(), RequestContext("test"))
    await anext(responses)
    await until(lambda: models.open == 1)
    [driver] = [task for task in asyncio.all_tasks() if task.get_name() == "pipeline 'glue'"]
    await responses.aclose()
    assert "pipeline 'glue' does not end though it was cancelled 0.05 s ago, at " in caplog.text
    assert models.open == 0
    assert driver not in asyncio.all_tasks(), "the end of the loop does not wait for it"
    asked = len(models.requests)
    await asyncio.sleep(0.3)
    assert len(models.requests) == asked
    module_of(glue).over = True
    await until(driver.done)


async def test_requests_for_one_another_are_bounded(tmp_path: Path) -> None:
    glue = await loaded(
        tmp_path, "async def run(r, lookup):\n    yield {'U': (await lookup('text').infer({'IN': 'a'}))['OUT']}"
    )
    assert await answers(glue, depth=MAX_DEPTH - 1) == [b"a"]
    with pytest.raises(Internal, match=f"model 'text' is asked at the end of {MAX_DEPTH} requests for one another"):
        await answers(glue, depth=MAX_DEPTH)


async def test_times_are_those_of_what_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models()
    acquire = Models.acquire

    def timed(self: Models, context: RequestContext, name: str, version: str = "") -> object:
        context.execution = ExecutionTimes(1000, 1500, (10, 20, 30))
        return acquire(self, context, name, version)

    monkeypatch.setattr(Models, "acquire", timed)
    code = """
    async def run(request, lookup):
        for _ in range(3):
            await lookup("text").infer({"IN": "a"})
        return {"Y": 1}
    """
    glue = await loaded(tmp_path, code, models)
    assert await answers(glue) == [1]
    found = glue.statistics().inference
    assert (found.queue.ns, found.compute_input.ns, found.compute_infer.ns) == (1500, 30, 60)
