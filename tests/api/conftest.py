"""A gateway that needs no model: what it answers, each test says."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import posix_ipc
import pytest
from starlette.types import ASGIApp

from charonia.api.app import build_app
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.core.adapter import Adapter
from charonia.core.errors import NotFound
from charonia.core.gateway import NO_FILES, ModelState, RepositoryIndexEntry, ServedAdapter
from charonia.core.logprobs import PromptToken, TokenLogprob
from charonia.core.metrics import ModelStatistics
from charonia.core.model import ModelConfig
from charonia.core.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    TokenizedPrompt,
    TokenizeRequest,
    Usage,
)
from charonia.core.request_context import Headers, RequestContext
from charonia.core.tensor import Tensor, TensorSpec
from charonia.processes.client_shared_memory import CudaMemoryRegion, SharedMemoryRegistry
from charonia.processes.cuda_memory import CudaDriver, CudaMemory
from charonia.repository.request_validation import validate_request
from charonia.telemetry.request_log import request_filter
from charonia.telemetry.shared_state import SharedState
from tests.scored_tokens import scored

from ..gpu_stand_in import GpuAllocation, gpu_allocation
from .inline_model import InlineServer

LLM = ModelConfig(
    "llm",
    "1",
    "charonia",
    decoupled=True,
    inputs=(
        TensorSpec("text_input", "BYTES", (1,), optional=True),
        TensorSpec("stream", "BOOL", (1,), optional=True),
        TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
    ),
    outputs=(TensorSpec("text_output", "BYTES", (-1,)),),
    created=1700000000,
)
NUMBERS = ModelConfig(
    "numbers",
    "3",
    "identity",
    platform="identity_platform",
    max_batch_size=4,
    inputs=(
        TensorSpec("MATRIX", "FP32", (2, -1)),
        TensorSpec("COUNT", "UINT8", (1,), optional=True),
        TensorSpec("SIGNED", "INT64", (-1,), optional=True),
        TensorSpec("HALF", "FP16", (1,), optional=True),
    ),
    outputs=(TensorSpec("OUT", "FP32", (2, -1)),),
    raw={"name": "numbers", "max_batch_size": 4, "input": [{"name": "MATRIX", "data_type": "TYPE_FP32"}]},
    labels={"OUT": ("cat", "dog")},
)


def _openai(name: str, served: str, *inputs: TensorSpec, batch: int = 0) -> ModelConfig:
    """A model of tensors that an endpoint of OpenAI's serves."""
    texts = (TensorSpec("text_output", "BYTES", (-1,)),)
    parameters = {"openai": served}
    return ModelConfig(name, "1", "ensemble", max_batch_size=batch, inputs=inputs, outputs=texts, parameters=parameters)


def _single(name: str, datatype: str, dims: tuple[int, ...], batch: int = 0, decoupled: bool = False) -> ModelConfig:
    spec = TensorSpec("IN", datatype, dims)
    return ModelConfig(name, "1", "b", max_batch_size=batch, decoupled=decoupled, inputs=(spec,))


UNLISTED = (
    replace(LLM, name="seeing", media=frozenset({"image"})),
    replace(LLM, name="blind", refused_media={"image": "no tower"}),
    replace(LLM, name="hearing", media=frozenset({"audio"}), transcribes=True),
    _single("single", "FP32", (-1, 2), batch=8),
    _single("text", "BYTES", (1,)),
    _single("texts", "BYTES", (2,)),
    _single("free-texts", "BYTES", (-1,)),
    _single("free", "FP32", (-1, -1)),
    _single("decoupled", "FP32", (1,), decoupled=True),
    replace(_single("nested", "FP32", (1,)), inputs=(TensorSpec("parameters", "FP32", (1,)),)),
    _openai(
        "chatting",
        "chat",
        TensorSpec("messages", "BYTES", (1,)),
        TensorSpec("temperature", "FP32", (1,), optional=True),
        TensorSpec("max_tokens", "INT32", (1,), optional=True),
        TensorSpec("seed", "UINT64", (1,), optional=True),
        TensorSpec("stop", "BYTES", (-1,), optional=True),
        TensorSpec("stream", "BOOL", (1,), optional=True),
        TensorSpec("logit_bias", "BYTES", (1,), optional=True),
        TensorSpec("tools", "BYTES", (1,), optional=True),
        batch=4,
    ),
    _openai("answering", "chat", TensorSpec("text_input", "BYTES", (1,))),
    _openai("completing", "completions", LLM.inputs[0], LLM.inputs[2]),
)
"""Models for those who know their names, most of one input."""


@dataclass
class FakeGateway:
    """Answers with `texts` (the last of them `final`), then raises `error`, then waits if `hang`.

    Remembers what it was asked. `responses`: what `infer` answers instead of texts. `chosen`: the logprob of a choice's
    tokens, -1 of those that are not in it. `chunks`: what `generate` answers instead of texts.
    """

    texts: tuple[str, ...] = ("one", " two")
    error: Exception | None = None
    hang: bool = False
    final: bool = False
    is_ready: bool = True
    is_exiting: bool = False
    full: Exception | None = None
    asked: list[InferRequest | GenerateRequest] = field(default_factory=list)
    tokenized: list[TokenizeRequest] = field(default_factory=list)
    open_streams: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    contexts: list[RequestContext] = field(default_factory=list)
    shared_state: SharedState = field(default_factory=SharedState)
    responses: tuple[InferResponse, ...] | None = None
    counted: list[ModelStatistics] = field(default_factory=list)
    chosen: dict[int, float] = field(default_factory=dict)
    indexed: list[RepositoryIndexEntry] = field(default_factory=list)
    loads: list[tuple[object, ...]] = field(default_factory=list)
    served_adapters: list[ServedAdapter] = field(default_factory=list)
    stop_reason: str | int | None = None
    chunks: tuple[GenerateChunk, ...] = ()

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        self.contexts.append(RequestContext(endpoint, headers))
        return self.contexts[-1]

    def find_inline(self, name: str, version: str = "") -> None: ...

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> "FakeHandle":
        for served in self.served_adapters:
            if served.is_called(name):
                context.adapter = served.adapter.name
                return FakeHandle(self, served.config, context.adapter)
        return FakeHandle(self, self.model_config(name, version))

    def check_room(self, context: RequestContext | None = None) -> None:
        if self.full is not None:
            raise self.full

    def ready(self) -> bool:
        return self.is_ready

    def alive(self) -> bool:
        return True

    def exiting(self) -> bool:
        return self.is_exiting

    def requests_in_flight(self) -> int:
        return self.open_streams

    async def tokenizer_info(self, name: str) -> dict[str, Any]:
        return {"tokenizer_class": "Fast", "model": self.model_config(name).name}

    def model_configs(self) -> list[ModelConfig]:
        return [LLM, NUMBERS]

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        for config in (*self.model_configs(), *UNLISTED):
            if config.name == name:
                if version in ("", config.version):
                    return config
                raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        raise NotFound(f"Request for unknown model: '{name}' is not found")

    def served_versions(self, name: str) -> tuple[str, ...]:
        return (self.model_config(name).version,)

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return [each for each in self.counted if name in ("", each.name) and version in ("", each.version)]

    loads_on_request = True

    async def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        return [entry for entry in self.indexed if not ready_only or entry.state is ModelState.READY]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        if self.error is not None:
            raise self.error
        self.loads.append((name, config, dict(files)))

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        self.loads.append((name, dependents))

    def adapters(self) -> list[ServedAdapter]:
        return self.served_adapters

    async def load_adapter(self, name: str, path: str, model: str = "", replace: bool = False) -> Adapter:
        if self.error is not None:
            raise self.error
        self.loads.append((name, path, model, replace))
        return Adapter(name, path, "d" * 64, 8, 1000)

    async def unload_adapter(self, name: str) -> ServedAdapter:
        for served in self.served_adapters:
            if served.is_called(name):
                self.served_adapters.remove(served)
                return served
        raise NotFound(f"The lora adapter '{name}' cannot be found.", field="lora_name")

    def is_model_ready(self, name: str, version: str = "") -> bool:
        known = {
            (config.name, number) for config in (*self.model_configs(), *UNLISTED) for number in ("", config.version)
        }
        return self.is_ready and (name, version) in known

    async def unready_reason(self, name: str, version: str = "") -> str:
        return "" if self.is_model_ready(name, version) else "Model version not ready"

    async def answers(self) -> AsyncGenerator[str, None]:
        self.open_streams += 1
        try:
            for text in self.texts:
                yield text
            if self.error is not None:
                raise self.error
            if self.hang:
                self.waiting.set()
                await asyncio.Event().wait()
        finally:
            self.open_streams -= 1


class FakeHandle:
    """A model of a `FakeGateway`."""

    def __init__(self, gateway: FakeGateway, config: ModelConfig, adapter: str = "") -> None:
        self._gateway = gateway
        self.config = config
        self.name = adapter or config.name

    def check_room(self) -> None:
        self._gateway.check_room()

    def answer_now(self, request: InferRequest) -> None: ...

    def validate(self, request: InferRequest) -> None:
        validate_request(self.config, request)

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self._gateway.asked.append(request)
        for response in self._gateway.responses or ():
            yield response
        if self._gateway.responses is not None:
            return
        async with aclosing(self._gateway.answers()) as texts:
            count = 0
            async for text in texts:
                count += 1
                final = self._gateway.final and count == len(self._gateway.texts)
                yield InferResponse((Tensor.from_values("text_output", "BYTES", [text.encode()]),), final=final)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self._gateway.asked.append(request)
        for chunk in self._gateway.chunks:
            yield chunk
        if self._gateway.chunks:
            return
        count, chosen = 0, self._gateway.chosen.get(request.choice, -1.0)
        async with aclosing(self._gateway.answers()) as texts:
            async for text in texts:
                count += 1
                reason = FinishReason.STOP if count == len(self._gateway.texts) and not self._gateway.error else None
                yield GenerateChunk(
                    text=f"hi{text}" if request.echo and count == 1 else text,
                    token_ids=(count,),
                    usage=Usage(5, count, 2),
                    finish_reason=reason,
                    stop_reason=reason and self._gateway.stop_reason,
                    logprobs=_logprobs(count, text, request.sampling.logprobs, chosen),
                    prompt_logprobs=_prompt(request.sampling.prompt_logprobs) if count == 1 else (),
                    prompt_ids=(7, 8) if request.return_prompt_ids and count == 1 else (),
                )

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        self._gateway.tokenized.append(request)
        ids = [1, 2, 3]
        return TokenizedPrompt(ids, [f"t{token}" for token in ids] if request.with_strings else None)

    async def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _logprobs(token: int, text: str, top: int | None, chosen: float = -1.0) -> tuple[TokenLogprob, ...]:
    """The chosen token is the second likeliest."""
    if top is None:
        return ()
    likeliest = (0, "?", -0.5), (token, text, chosen)
    return (scored(token, text, chosen, *likeliest[:top]),)


def _prompt(top: int | None) -> tuple[PromptToken, ...]:
    """The prompt is always hi."""
    if top is None:
        return ()
    [second] = _logprobs(8, "i", top)
    return PromptToken(7, "h"), PromptToken(8, "i", second, 2)


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(gateway, ServerInfo("triton", "9.9", max_input_size=2000, max_raw_size=10_000))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as connected:
        yield connected


@pytest.fixture
def on_gpu() -> Iterator[GpuAllocation]:
    """A client's memory on a GPU of the stand-in, of a page."""
    with gpu_allocation(4096) as made:
        yield made


@pytest.fixture
async def gpu_regions(cuda_library: Path, on_gpu: GpuAllocation) -> SharedMemoryRegistry:
    """A registry that has it as "g"."""
    regions = SharedMemoryRegistry(True, partial(CudaDriver, str(cuda_library)))
    await regions.register_cuda(CudaMemoryRegion("g", on_gpu.handle, 0, 4096))
    return regions


@pytest.fixture
def copying_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that copied from and to GPUs."""
    seen: list[threading.Thread] = []

    def watched(copy: Any) -> Any:
        return lambda *arguments: seen.append(threading.current_thread()) or copy(*arguments)

    for name in ("read", "write"):
        monkeypatch.setattr(CudaMemory, name, watched(getattr(CudaMemory, name)))
    return seen


@pytest.fixture
def shared_memory() -> Iterator[str]:
    """The key of a shared memory object of one page, as a client makes it."""
    key = f"/charonia_api_{os.getpid()}"
    posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096).close_fd()
    yield key
    posix_ipc.unlink_shared_memory(key)


@pytest.fixture
async def port(echo: ASGIApp) -> AsyncIterator[int]:
    """Where the test's own `echo` answers over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(echo, sock, access_log=False)
        await server.start()
        yield sock.getsockname()[1]
        await server.stop()


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> InlineServer:
    """One whose log has no requests that succeed."""
    monkeypatch.setattr(request_filter, "requests", "llm")
    return InlineServer()
