"""Batches run: whatever the endpoint answers, and whenever the server ends, each request stands in the files once."""

import asyncio
import errno
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from charonia.api.http.error_responses import json_response
from charonia.api.http.request_context import context_of, record_warning
from charonia.core.errors import CharoniaError, InvalidArgument, NotFound, NotReady, QueueFull, RequestTimeout
from charonia.extras.batches import runner, running_batch, store
from charonia.extras.batches.records import BatchRecord, BatchStatus, FilePurpose, StoredFile, new_id
from charonia.extras.batches.runner import BatchRunner
from charonia.extras.batches.store import FileStore, StorageFull, open_store

PATH = "/v1/completions"
Script = Callable[[Request, str], Awaitable[Response | None]]


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_batch, "_RETRY_SECONDS", (0.001, 0.002))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Clock:
    """Seconds since 1970, as the test says."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Laboratory:
    """A runner over a store, whose endpoint does what the test's `script` says with each prompt; None answers it."""

    def __init__(self, gateway: Any, directory: Path, limits: Any, concurrency: int = 4) -> None:
        self.gateway, self.directory, self.limits = gateway, directory, limits
        self.asked = Counter[str]()
        self.clock = Clock()
        self.script: Script = self._answer
        self.concurrency = concurrency
        self.store, self.runner = self.open()

    async def _answer(self, request: Request, prompt: str) -> Response | None:
        return None

    def open(self) -> tuple[FileStore, BatchRunner]:
        """As a server does when it starts."""
        self.store = open_store(self.directory, self.limits, self.clock)
        self.runner = BatchRunner(self.store, self.gateway, self.concurrency)
        self.runner.endpoints = {PATH: cast(Any, self.endpoint)}
        return self.store, self.runner

    async def endpoint(self, request: Request) -> Response:
        prompt = json.loads(await request.body())["prompt"]
        self.asked[prompt] += 1
        answer = await self.script(request, prompt)
        return json_response({"text": prompt}) if answer is None else answer

    def add(self, content: bytes, tenant: str = "") -> BatchRecord:
        now = self.store.time_ns()
        file = StoredFile(
            id=new_id("file-"),
            tenant=tenant,
            purpose=FilePurpose.BATCH,
            filename="x",
            size=len(content),
            made=now,
            expires_at=now // 10**9 + 10**6,
        )
        self.store.path(file.id).write_bytes(content)
        self.store.write_file(file)
        self.store.add_file(file)
        self.store.charge("", 65536)
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=tenant,
            tenant_weight=1.0,
            made=self.store.time_ns(),
            input_file_id=file.id,
            endpoint=PATH,
            completion_window="24h",
            expires_at=self.store.now() + 86_400,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            output_seconds=10**6,
        )
        self.store.add_batch(record)
        self.store.write_batch(record.id, msgspec.json.encode(record))
        self.runner.launch(record)
        return record

    async def restart(self, record: BatchRecord) -> BatchRecord:
        """As if the server had ended, and begun again."""
        await self.runner.pause()
        self.store.close()
        self.open()
        self.runner.start()
        return self.store.find_batch(record.tenant, record.id)

    async def ended(self, record: BatchRecord) -> BatchRecord:
        await until(lambda: record.status.ended and record.id not in self.runner._batches)
        return record

    def lines(self, file_id: str) -> list[Any]:
        path = self.store.path(file_id)
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def outcomes(self, record: BatchRecord) -> dict[str, Any]:
        """What the files say of each custom id, which must be in them once: a status, or an error's code."""
        both = self.lines(record.output_id), self.lines(record.error_id)
        told = [
            (each["custom_id"], each["response"]["status_code"] if each["response"] else each["error"]["code"])
            for each in (*both[0], *both[1])
        ]
        assert len(dict(told)) == len(told)
        return dict(told)


@pytest.fixture
def laboratory(gateway: Any, tmp_path: Path, limits: Any) -> Laboratory:
    return Laboratory(gateway, tmp_path / "files", limits)


@pytest.fixture
def lines(line: Any) -> Callable[[int], bytes]:
    return lambda count: b"".join(map(line, range(count)))


ALL = {f"r{number}": 200 for number in range(20)}


async def test_every_request_is_answered_once(laboratory: Laboratory, lines: Any) -> None:
    record = laboratory.add(lines(20))
    laboratory.runner.start()
    await laboratory.ended(record)
    assert record.status is BatchStatus.COMPLETED
    assert laboratory.outcomes(record) == ALL
    assert (record.total, record.completed, record.failed) == (20, 20, 0)
    assert set(laboratory.asked.values()) == {1}
    assert [record.has_output, record.has_errors] == [True, False]
    contexts = laboratory.gateway.contexts
    assert {(context.endpoint, context.background) for context in contexts} == {("completions", True)}
    view = record.view()
    reached = {name for name, value in view.items() if name.endswith("_at") and value}
    assert reached == {"created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at"}
    await laboratory.runner.pause()


async def test_what_is_ignored_of_a_line_is_named_in_its_answer(laboratory: Laboratory, line: Any) -> None:
    async def script(request: Request, prompt: str) -> Response | None:
        if prompt == "p1":
            record_warning(request.scope, "ignored: trace_id")
        return None

    laboratory.script = script
    record = laboratory.add(line(0) + line(1))
    laboratory.runner.start()
    await laboratory.ended(record)
    answers = {each["custom_id"]: each["response"] for each in laboratory.lines(record.output_id)}
    assert answers["r1"]["warning"] == "ignored: trace_id"
    assert "warning" not in answers["r0"]
    await laboratory.runner.pause()


async def test_a_wrong_file_runs_nothing(laboratory: Laboratory, line: Any) -> None:
    laboratory.runner.start()
    record = await laboratory.ended(laboratory.add(line(0) + b"x\n"))
    unknown = await laboratory.ended(laboratory.add(line(0, body={"model": "nobody"})))
    assert [record.status, unknown.status] == [BatchStatus.FAILED] * 2
    assert [(error.code, error.line) for error in record.errors] == [("invalid_json_line", 2)]
    assert [error.code for error in unknown.errors] == ["model_not_found"]
    assert not laboratory.asked
    await laboratory.runner.pause()


async def test_what_the_endpoint_refuses_is_a_line_of_the_error_file(laboratory: Laboratory, line: Any) -> None:
    async def script(request: Request, prompt: str) -> Response | None:
        if prompt == "p1":
            raise InvalidArgument("no", field="prompt")
        if prompt == "p2":
            raise RequestTimeout
        if prompt == "p3":
            raise ZeroDivisionError
        return None

    laboratory.script = script
    body = {"model": "llm", "prompt": "p4", "stream": True}
    record = laboratory.add(b"".join(map(line, range(4))) + line(4, body=body))
    laboratory.runner.start()
    await laboratory.ended(record)
    assert laboratory.outcomes(record) == {"r0": 200, "r1": 400, "r2": 503, "r3": 500, "r4": 400}
    assert (record.completed, record.failed) == (1, 4)
    assert [each["custom_id"] for each in laboratory.lines(record.output_id)] == ["r0"]
    assert laboratory.asked["p4"] == 0
    await laboratory.runner.pause()


async def test_a_full_queue_and_a_model_that_comes_later_are_waited_for(laboratory: Laboratory, lines: Any) -> None:
    async def script(request: Request, prompt: str) -> Response | None:
        tried = laboratory.asked[prompt]
        errors: dict[int, CharoniaError] = {
            1: QueueFull("full", retry_after=1.0),
            2: NotReady("loading"),
            3: NotFound("unloaded", field="model"),
        }
        if prompt in ("p3", "p4") and tried in errors:
            raise errors[tried]
        if prompt == "p5" and tried == 1:
            return json_response({"error": "an endpoint that answers for itself"}, 429)
        return None

    laboratory.script = script
    record = laboratory.add(lines(20))
    laboratory.runner.start()
    await laboratory.ended(record)
    assert laboratory.outcomes(record) == ALL
    assert laboratory.asked["p3"] == laboratory.asked["p4"] == 4
    await laboratory.runner.pause()


async def test_a_lost_engine_is_no_request_s_fault_but_the_fifth_is(laboratory: Laboratory, lines: Any) -> None:
    """p7 takes the engine with it, and with that whatever runs beside it."""
    died = asyncio.Event()

    async def script(request: Request, prompt: str) -> Response | None:
        nonlocal died
        context = context_of(request.scope)
        context.add_sequence(cast(Any, type("Submitted", (), {"submitted": 1.0, "end": None})()))
        mine = died
        try:
            if prompt == "p7":
                await asyncio.sleep(0.001)
                died = asyncio.Event()
                mine.set()
            else:
                await asyncio.wait_for(mine.wait(), 0.003)
            raise NotReady("the engine was lost")
        except TimeoutError:
            return None

    laboratory.script = script
    record = laboratory.add(lines(20))
    laboratory.runner.start()
    await laboratory.ended(record)
    assert laboratory.outcomes(record) == ALL | {"r7": 503}
    assert laboratory.asked["p7"] == 5
    await laboratory.runner.pause()


async def test_a_cancelled_batch_keeps_what_was_answered(laboratory: Laboratory, lines: Any) -> None:
    hanging = asyncio.Event()

    async def script(request: Request, prompt: str) -> Response | None:
        if prompt >= "p5" or len(prompt) > 2:
            hanging.set()
            await asyncio.Event().wait()
        return None

    laboratory.script = script
    record = laboratory.add(lines(20))
    laboratory.runner.start()
    await hanging.wait()
    await until(lambda: record.completed >= 4)
    await laboratory.runner.cancel(record)
    await laboratory.runner.cancel(record)
    assert record.status is BatchStatus.CANCELLING
    await laboratory.ended(record)
    told = laboratory.outcomes(record)
    assert len(told) == 20
    assert Counter(told.values())[200] == record.completed >= 4
    assert set(told.values()) == {200, "batch_cancelled"}
    assert all(context.closed and context.end.outcome == "cancelled" for context in laboratory.gateway.contexts[-2:])
    await laboratory.runner.pause()


async def test_a_batch_is_cancelled_while_the_disk_is_full(
    laboratory: Laboratory, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told at once that it was not kept, also where others wait for the disk; the batch ends with it."""
    full, hanging = True, asyncio.Event()

    async def script(request: Request, prompt: str) -> Response | None:
        hanging.set()
        await asyncio.Event().wait()
        return None

    def write_aside(path: Path, content: bytes) -> None:
        if full:
            raise store.write_failed(OSError(errno.ENOSPC, "no space"))
        replace(path, content)

    replace = store.write_aside
    monkeypatch.setattr(runner, "_DISK_SECONDS", 0.001)
    laboratory.script = script
    records = [laboratory.add(lines(20)) for _ in range(2)]
    laboratory.runner.start()
    await hanging.wait()
    await until(lambda: all(record.total for record in records))
    monkeypatch.setattr(store, "write_aside", write_aside)
    for record in records:
        with pytest.raises(StorageFull) as refused:
            await laboratory.runner.cancel(record)
        assert refused.value.status == 507
    await asyncio.sleep(0.01)
    assert not any(record.status.ended for record in records)
    full = False
    for record in records:
        await laboratory.ended(record)
        assert record.status is BatchStatus.CANCELLED
    await laboratory.runner.pause()


async def test_a_batch_whose_window_is_over_expires(laboratory: Laboratory, lines: Any) -> None:
    async def script(request: Request, prompt: str) -> Response | None:
        if prompt != "p0":
            await asyncio.Event().wait()
        return None

    laboratory.script = script
    laboratory.clock.now += 1
    record = laboratory.add(lines(3))
    laboratory.runner.start()
    await until(lambda: record.completed == 1)
    laboratory.clock.now += 86_400
    record = await laboratory.ended(await laboratory.restart(record))
    assert record.status is BatchStatus.EXPIRED
    assert laboratory.outcomes(record) == {"r0": 200, "r1": "batch_expired", "r2": "batch_expired"}
    assert (record.completed, record.failed) == (1, 0)
    await laboratory.runner.pause()


async def test_a_server_that_ends_again_and_again_asks_only_what_is_left(laboratory: Laboratory, lines: Any) -> None:
    gate = asyncio.Semaphore(0)

    async def script(request: Request, prompt: str) -> Response | None:
        await gate.acquire()
        return None

    laboratory.script = script
    record = laboratory.add(lines(20))
    laboratory.runner.start()
    for run in range(6):
        for _ in range(3):
            gate.release()
        await until(lambda: gate.locked())
        if run % 2:  # else the answers may be on their way to the disk
            await asyncio.sleep(0.005)
        record = await laboratory.restart(record)
    for _ in range(40):
        gate.release()
    await laboratory.ended(record)
    assert laboratory.outcomes(record) == ALL
    assert record.status is BatchStatus.COMPLETED
    await laboratory.runner.pause()


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.CANCELLING])
async def test_a_server_that_ends_while_a_batch_ends_ends_it(
    laboratory: Laboratory, lines: Any, status: BatchStatus
) -> None:
    """Whatever was written by then: here the files' records were, and the batch's was not."""
    laboratory.runner.start()
    record = await laboratory.ended(laboratory.add(lines(20)))
    await laboratory.runner.pause()
    ends_as = BatchStatus.COMPLETED if status is BatchStatus.FINALIZING else BatchStatus.CANCELLED
    record.status, record.ends_as = status, ends_as
    laboratory.store.write_batch(record.id, msgspec.json.encode(record))
    used = laboratory.store.used
    record = await laboratory.ended(await laboratory.restart(record))
    assert record.status is ends_as
    assert laboratory.outcomes(record) == ALL
    assert len(laboratory.store.list_files("")) == 2
    assert laboratory.store.used == used
    await laboratory.runner.pause()


async def test_a_batch_without_room_fails_and_keeps_what_it_has(laboratory: Laboratory, lines: Any) -> None:
    async def script(request: Request, prompt: str) -> Response | None:
        return json_response({"text": "x" * 100_000})

    laboratory.script = script
    record = laboratory.add(lines(20))
    laboratory.runner.start()
    await laboratory.ended(record)
    assert record.status is BatchStatus.FAILED
    assert [error.code for error in record.errors] == ["storage_quota_exceeded"]
    assert 5 < record.completed == len(laboratory.lines(record.output_id)) < 10
    assert laboratory.store.used <= laboratory.limits.total_bytes
    await laboratory.runner.pause()


async def test_no_more_run_than_there_are_slots_and_tenants_share_them(laboratory: Laboratory, lines: Any) -> None:
    running, most, first, begun = 0, 0, list[str](), asyncio.Event()

    async def script(request: Request, prompt: str) -> Response | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        first.append(context_of(request.scope).tenant)
        await begun.wait()
        running -= 1
        return None

    laboratory.script = script
    records = [laboratory.add(lines(20), "busy") for _ in range(3)] + [laboratory.add(lines(20), "calm")]
    laboratory.runner.start()
    await until(lambda: running == 4 and set(laboratory.runner._slots._waiting) == {"busy", "calm"})
    begun.set()
    for record in records:
        await laboratory.ended(record)
    assert most == laboratory.concurrency
    assert first[4:44].count("calm") > 11  # a fourth is ten; its half, where the disk brings its lines in time
    await laboratory.runner.pause()
