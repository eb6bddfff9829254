"""Every engine that a text model may have behind it: our own core, and TensorRT-LLM in two versions.

Real tokenizer, real core process with the fake executor; a fake `tensorrt_llm` with the signatures of its contract. The
next token is the last one plus one.
"""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from charonia.core.request_context import RequestContext
from charonia.engine.client.llm import LlmModel
from charonia.engine.config import EngineConfig, FakeConfig
from charonia.engine.trtllm.build import trtllm_engine_spec
from charonia.engine.trtllm.options import TrtllmOptions
from charonia.scheduler.config import SchedulerConfig

ENGINES = ("core", "1.2.0")
LENGTH = 64
Load = Callable[..., Awaitable[LlmModel]]


@contextmanager
def counted(model: LlmModel) -> Iterator[RequestContext]:
    """A request of the model, counted as the gateway would."""
    context = RequestContext("test")
    context.on_end(model.count)
    with context:
        yield context


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def load(
    engine: str,
    words: Path,
    sibling: Callable[[str], ModuleType],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Load]:
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    loaded: list[LlmModel] = []

    def ours(step_seconds: float, max_num_seqs: int, **limits: float) -> LlmModel:
        fake = FakeConfig(vocab_size=100, max_model_len=LENGTH, step_seconds=step_seconds)
        scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
        config = EngineConfig(model=str(words), executor="fake", fake=fake, scheduler=scheduler, **limits)
        return LlmModel("words", "1", config)

    def theirs(step_seconds: float, max_num_seqs: int, **limits: float) -> LlmModel:
        monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "1")
        package = sibling("engine/trtllm/fake.py").FakePackage(engine).install(monkeypatch)
        package.step_seconds = step_seconds
        return LlmModel(
            "words", "1", trtllm_engine_spec(str(words), TrtllmOptions(max_num_seqs=max_num_seqs, **limits))
        )

    async def load(step_seconds: float = 0.0, max_num_seqs: int = 8, **limits: float) -> LlmModel:
        make = ours if engine == "core" else theirs
        loaded.append(make(step_seconds, max_num_seqs, **limits))
        await loaded[-1].load()
        return loaded[-1]

    yield load
    for model in loaded:
        await model.unload()
    assert list(sockets.iterdir()) == []
