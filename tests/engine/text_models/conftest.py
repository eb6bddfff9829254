"""A text model over our own core. A package with another engine runs these tests over that one: see
tests/extras/trtllm/text_models.

Real tokenizer, real core process with the fake executor. The next token is the last one plus one.
"""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from charonia.core.request_context import RequestContext
from charonia.engine.client.llm import LlmModel
from charonia.engine.config import EngineConfig, FakeConfig
from charonia.scheduler.config import SchedulerConfig

LENGTH = 64
Load = Callable[..., Awaitable[LlmModel]]


@contextmanager
def counted(model: LlmModel) -> Iterator[RequestContext]:
    """A request of the model, counted as the gateway would."""
    context = RequestContext("test")
    context.on_end(model.count)
    with context:
        yield context


@pytest.fixture
def engine() -> str:
    return "core"


@pytest.fixture
def make_model(words: Path) -> Callable[..., LlmModel]:
    """Makes a model, not yet loaded, over the engine."""

    def make(step_seconds: float, max_num_seqs: int, **limits: float) -> LlmModel:
        fake = FakeConfig(vocab_size=100, max_model_len=LENGTH, step_seconds=step_seconds)
        scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
        config = EngineConfig(model=str(words), executor="fake", fake=fake, scheduler=scheduler, **limits)
        return LlmModel("words", "1", config)

    return make


@pytest.fixture
async def load(
    make_model: Callable[..., LlmModel], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Load]:
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    loaded: list[LlmModel] = []

    async def load(step_seconds: float = 0.0, max_num_seqs: int = 8, **limits: float) -> LlmModel:
        loaded.append(make_model(step_seconds, max_num_seqs, **limits))
        await loaded[-1].load()
        return loaded[-1]

    yield load
    for model in loaded:
        await model.unload()
    assert list(sockets.iterdir()) == []
