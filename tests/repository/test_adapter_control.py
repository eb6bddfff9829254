"""Adapters of served models: by which names they are found, and how they come and go."""

from collections.abc import AsyncGenerator

import pytest

from charonia.core.adapter import Adapter
from charonia.core.errors import InvalidArgument, NotFound, ServerExiting
from charonia.core.metrics import VersionStatistics
from charonia.core.model import Capabilities, ModelConfig, ModelStats
from charonia.core.request import (
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    TokenizedPrompt,
    TokenizeRequest,
)
from charonia.core.request_context import RequestContext
from charonia.repository.gateway import InProcessGateway

from ..built_models import serve_model


class Writer:
    """A model that takes adapters, unless `takes` is false."""

    def __init__(self, name: str, *adapters: str, takes: bool = True) -> None:
        self.config = ModelConfig(name, "1", "writer")
        self.named = {each: Adapter(each, f"/loras/{each}", "0" * 64, 8, 1000) for each in adapters}
        self.takes = takes
        self.unloads: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(text=self, adapters=self)

    async def load(self) -> None: ...

    async def unload(self) -> None: ...

    def stats(self) -> ModelStats:
        return ModelStats(True)

    def statistics(self) -> VersionStatistics:
        return VersionStatistics()

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        yield InferResponse(())

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[GenerateChunk, None]:
        if False:
            yield

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        return TokenizedPrompt([])

    async def detokenize(self, ids: list[int]) -> str:
        return ""

    async def tokenizer_info(self) -> dict[str, object]:
        raise NotImplementedError

    @property
    def adapters(self) -> dict[str, Adapter] | None:
        return self.named if self.takes else None

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> Adapter:
        self.named[name] = Adapter(name, path, "1" * 64, 8, 1000)
        return self.named[name]

    async def unload_adapter(self, name: str) -> None:
        del self.named[name]


async def gateway_of(*models: Writer, **aliases: str) -> InProcessGateway:
    gateway = InProcessGateway()
    for model in models:
        await serve_model(gateway, model, "1")
    gateway.registry.aliases |= aliases
    return gateway


async def found(gateway: InProcessGateway, name: str) -> tuple[str, str, str]:
    """The model, the adapter and the name to answer with, of a request for `name`."""
    with gateway.open_request("test") as context:
        handle = await gateway.acquire(context, name)
        return context.model, context.adapter, handle.name


async def test_a_model_is_found_by_its_adapters_names() -> None:
    gateway = await gateway_of(Writer("base", "sql", "org/poet:v2"), Writer("other"), gpt="base")
    assert await found(gateway, "base") == ("base", "", "base")
    for name in ("sql", "base:sql", "gpt:sql"):
        assert await found(gateway, name) == ("base", "sql", "sql")
    for name in ("org/poet:v2", "base:org/poet:v2"):
        assert await found(gateway, name) == ("base", "org/poet:v2", "org/poet:v2")
    for name in ("other:sql", "base:", "base:none", ":sql", "sql:base", "base:base"):
        with pytest.raises(NotFound, match="is not found"):
            await found(gateway, name)
    assert gateway.model_config("sql").name == "base"
    assert gateway.is_model_ready("sql")


async def test_a_name_that_several_have_is_the_models_or_needs_one() -> None:
    gateway = await gateway_of(Writer("a", "sql", "b"), Writer("b", "sql"))
    assert await found(gateway, "b") == ("b", "", "b")
    assert await found(gateway, "a:b") == ("a", "b", "b")
    assert (await found(gateway, "a:sql"))[0] == "a"
    assert (await found(gateway, "b:sql"))[0] == "b"
    with pytest.raises(NotFound, match="several models have such an adapter: ask for 'a:sql' or 'b:sql'"):
        await found(gateway, "sql")
    assert [(adapter.name, adapter.config.name) for adapter in gateway.adapters()] == [
        ("a:sql", "a"),
        ("a:b", "a"),
        ("b:sql", "b"),
    ]


async def test_a_handle_for_another_request_has_the_adapter() -> None:
    gateway = await gateway_of(Writer("base", "sql"))
    with gateway.open_request("test") as outer, gateway.open_request("test") as inner:
        handle = (await gateway.acquire(outer, "sql")).for_request(inner)
    assert (inner.model, inner.adapter, handle.name) == ("base", "sql", "sql")


async def test_adapters_come_and_go() -> None:
    model = Writer("base")
    gateway = await gateway_of(model, Writer("plain", takes=False))
    assert (await gateway.load_adapter("sql", "/loras/sql")).path == "/loras/sql"
    assert [adapter.name for adapter in gateway.adapters()] == ["sql"]
    assert (await gateway.load_adapter("sql", "/loras/new", replace=True)).path == "/loras/new"
    assert (await gateway.unload_adapter("base:sql")).adapter.path == "/loras/new"
    assert model.named == {}
    with pytest.raises(NotFound, match="The lora adapter 'sql' cannot be found"):
        await gateway.unload_adapter("sql")
    with pytest.raises(NotFound, match="The lora adapter 'base' cannot be found"):
        await gateway.unload_adapter("base")
    gateway.begin_exit()
    with pytest.raises(ServerExiting):
        await gateway.load_adapter("sql", "/loras/sql")


async def test_a_new_name_must_be_one() -> None:
    gateway = await gateway_of(Writer("a", "sql"), Writer("b"), gpt="b")
    for name, text in (
        ("b", "the name 'b' is a model's"),
        ("gpt", "the name 'gpt' is a model's"),
        ("sql", "is that of an adapter of model 'a'"),
        ("", "must be 1 to 256 printable"),
        ("x" * 257, "must be 1 to 256 printable"),
        ("a\nb", "must be 1 to 256 printable"),
    ):
        with pytest.raises(InvalidArgument, match=text) as refusal:
            await gateway.load_adapter(name, "/loras/x", "b")
        assert refusal.value.field == "lora_name"


async def test_the_model_must_be_clear() -> None:
    gateway = await gateway_of(Writer("a"), Writer("b"), Writer("plain", takes=False))
    with pytest.raises(InvalidArgument, match="base_model_name must be one of a, b"):
        await gateway.load_adapter("sql", "/loras/sql")
    with pytest.raises(NotFound, match="'none' is not found"):
        await gateway.load_adapter("sql", "/loras/sql", "none")
    await gateway.load_adapter("sql", "/loras/sql", "b")
    assert (await found(gateway, "sql"))[0] == "b"
    with pytest.raises(NotFound, match="--enable-lora"):
        await (await gateway_of(Writer("plain", takes=False))).load_adapter("sql", "/loras/sql")
