"""A client that disconnects frees its blocks within `ahead` + 1 steps, counted at the engine's own reports."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from charonia.api.app import build_app
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.cli.ports import bind_port
from charonia.engine.client.llm import LlmModel
from charonia.engine.config import EngineConfig, FakeConfig
from charonia.engine.core.messages import EngineLoad, RequestUpdates
from charonia.repository.gateway import InProcessGateway
from charonia.scheduler.config import SchedulerConfig

from ..built_models import serve_model


class Steps:
    """What the engine reported, and where in it the abort was sent."""

    def __init__(self, model: LlmModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: list[RequestUpdates] = []
        self.aborted_after: int | None = None
        self._more = asyncio.Event()
        [replica] = model.client.replicas
        self._hear, self._send = replica.on_updates, replica.core.send
        monkeypatch.setattr(replica, "on_updates", self._on_updates)
        monkeypatch.setattr(replica.core, "send", self._on_send)

    def _on_updates(self, updates: RequestUpdates) -> None:
        self.reports.append(updates)
        self._more.set()
        self._hear(updates)

    def _on_send(self, message: Any) -> None:
        if type(message).__name__ == "AbortRequests":
            self.aborted_after = len(self.reports)
        self._send(message)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Look again at every report."""
        async with asyncio.timeout(60):
            while not holds():
                self._more.clear()
                await self._more.wait()

    def holding(self, blocks: int) -> int:
        """Reports that fewer than `blocks` are free."""
        return sum(report.load.free_blocks < blocks for report in self.reports)

    def holding_after_abort(self, blocks: int) -> int:
        """Steps after the abort was sent that still held blocks."""
        assert self.aborted_after is not None
        later = self.reports[self.aborted_after :]
        return len({report.step for report in later if report.load.free_blocks < blocks})


@asynccontextmanager
async def served(model: LlmModel) -> AsyncIterator[int]:
    """The model behind real sockets in this process; the port."""
    gateway = InProcessGateway()
    sock = bind_port("127.0.0.1", 0, "--http-port")
    await serve_model(gateway, model, "1")
    server = HttpServer(build_app(gateway, ServerInfo()), sock, access_log=False)
    await server.start()
    try:
        yield sock.getsockname()[1]
    finally:
        await server.stop()
        await gateway.lifecycle.close()
        sock.close()


PROMPT = {"input_ids": list(range(1, 40)), "max_tokens": 2000}
HELLO = [{"role": "user", "content": "hello"}]
DOORS = [
    ("/v2/models/m/generate_stream", PROMPT),
    ("/v2/models/m/generate", PROMPT),
    ("/v1/completions", {"model": "m", "prompt": PROMPT["input_ids"], "max_tokens": 2000}),
    ("/v1/messages", {"model": "m", "messages": HELLO, "max_tokens": 2000, "stream": True}),
    ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 2000, "ignore_eos": True}),
]


BOOK = {"model": "m", "prompt": "x" * 300_000, "truncate_prompt_tokens": 39, "max_tokens": 2000}
LONG_BODIES = [("/v1/completions", BOOK), ("/v1/completions", BOOK | {"stream": True})]
"""Behind more than 64 KiB nothing was read any more, and so not that the client left."""


@pytest.mark.parametrize("ahead", [0, 1])
async def test_blocks_are_free_soon_after(tokenizer_only: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    fake = FakeConfig(vocab_size=384, step_seconds=0.05)
    engine = EngineConfig(model=str(tokenizer_only), executor="fake", fake=fake, scheduler=SchedulerConfig(ahead=ahead))
    model = LlmModel("m", "1", engine)
    async with served(model) as port:
        info = model.client.info
        assert info
        for path, body, half in (*((*door, False) for door in (*DOORS, *LONG_BODIES)), (*DOORS[1], True)):
            steps = Steps(model, monkeypatch)
            await visit_and_leave(port, path, body, steps, info.blocks, half)
            await steps.until(lambda steps=steps: steps.aborted_after is not None)
            await steps.until(lambda steps=steps: steps.reports[-1].load.free_blocks == info.blocks)
            # One more report may have been under way, already made when the abort was sent.
            assert steps.holding_after_abort(info.blocks) <= ahead + 1 + 1, path
            assert model.client.replicas[0].core.load.running == 0


async def test_nothing_stays_of_those_who_left(tokenizer_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeConfig(vocab_size=384, step_seconds=0.002)
    model = LlmModel("m", "1", EngineConfig(model=str(tokenizer_only), executor="fake", fake=fake))
    async with served(model) as port:
        tasks, info, steps = asyncio.all_tasks(), model.client.info, Steps(model, monkeypatch)
        assert info
        moments = Random(7)
        await asyncio.gather(*(hurried(port, *DOORS[n % len(DOORS)], moments.uniform(0, 0.2)) for n in range(90)))
        await steps.until(
            lambda: steps.reports[-1].load == EngineLoad(0, 0, info.blocks, steps.reports[-1].load.step_seconds)
        )
        await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - tasks - {asyncio.current_task()})), 60)
        assert model.client.admission.waiting.requests == 0
        assert b'"text_output"' in await whole_answer(port)


async def hurried(port: int, path: str, body: Any, timeout: float) -> None:
    """Leave after `timeout` seconds, wherever the request is by then."""
    _, writer = await ask(port, path, body)
    await asyncio.sleep(timeout)
    writer.transport.abort()


async def whole_answer(port: int) -> bytes:
    reader, writer = await ask(port, DOORS[1][0], {"input_ids": [1], "max_tokens": 2})
    answer = await reader.readuntil(b"}")
    writer.close()
    return answer


async def ask(port: int, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer


async def visit_and_leave(port: int, path: str, body: Any, steps: Steps, blocks: int, half: bool = False) -> None:
    """`half`: close the sending half alone, and see that the server closes the other."""
    reader, writer = await ask(port, path, body)
    await steps.until(lambda: steps.holding(blocks) >= 5)
    if half:
        writer.write_eof()
        assert b'"error"' not in await reader.read()
    writer.close()
    await writer.wait_closed()
