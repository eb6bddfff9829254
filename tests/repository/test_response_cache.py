"""Answers that are kept: which questions are the same, what makes room, and what is counted."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.backends import ignore_progress
from charonia.core.errors import CharoniaError, Internal
from charonia.core.metrics import InferenceStatistics, Reading, StatisticDuration, VersionStatistics
from charonia.core.model import Capabilities, ModelConfig, ModelStats
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.tensor import Tensor
from charonia.repository.builder import ModelBuilder
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.config_io import parse_config_text
from charonia.repository.config_validation import ignored_fields, is_response_cache_enabled
from charonia.repository.gateway import InProcessGateway
from charonia.repository.response_cache import CachedModel, ResponseCache, parse_cache_config
from charonia.telemetry.shared_state import ModelServices

MUCH = 1 << 20
ENABLED = "response_cache { enable: true }"


class Doubling:
    """Y is twice X; counts what it is asked. Text cannot be doubled."""

    config = ModelConfig("m", "1", "doubling")

    def __init__(self) -> None:
        self.asked = 0
        self.unloaded = False
        self.buffer = np.zeros(4)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(measured=self)

    async def load(self) -> None: ...

    async def unload(self) -> None:
        self.unloaded = True

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        self.asked += 1
        [given] = request.inputs.values()
        if given.datatype == "BYTES":
            raise Internal("no numbers")
        made = self.buffer[: given.data.size]  # the same memory each time, as of isolated instances
        made[:] = 2 * given.data.ravel()
        yield InferResponse((Tensor("Y", "FP64", given.shape, made),), final=True)

    def stats(self) -> ModelStats:
        return ModelStats(True, success=self.asked)

    def statistics(self) -> VersionStatistics:
        each = StatisticDuration(self.asked, 1000 * self.asked)
        return VersionStatistics(
            0, self.asked, self.asked, InferenceStatistics(success=each, queue=each, compute_infer=each)
        )

    def count(self, context: RequestContext) -> None: ...

    def readings(self) -> Iterator[Reading]:
        yield Reading("nv_inference_request_success", self.asked)
        yield Reading("nv_inference_count", self.asked)
        yield Reading("nv_inference_request_duration_us", self.asked)


def question(values: Any = (1.0,), datatype: str = "FP64", outputs: Any = None, **parameters: Any) -> InferRequest:
    return InferRequest("id", {"X": Tensor.from_values("X", datatype, values)}, outputs, parameters)


async def ask(model: CachedModel, request: InferRequest, tenant: str = "") -> list[float]:
    context = RequestContext("test")
    context.tenant = tenant
    async with aclosing(model.infer(request, context)) as responses:
        [response] = [response async for response in responses]
    assert response.final
    return cast("list[float]", response.outputs[0].data.tolist())


async def test_what_was_asked_before_is_not_asked_again() -> None:
    model, cache = Doubling(), ResponseCache(MUCH)
    cached = CachedModel(model, cache, (0.5,))
    assert await ask(cached, question([1.0, 2.0])) == [2.0, 4.0]
    assert await ask(cached, question([5.0, 6.0])) == [10.0, 12.0]
    assert await ask(cached, question([1.0, 2.0])) == [2.0, 4.0]
    assert model.asked == 2
    said = cached.statistics()
    assert (said.inference_count, said.inference.success.count, said.inference.queue.count) == (2, 3, 3)
    assert (said.inference.compute_infer.count, said.inference.cache_hit.count) == (2, 1)
    assert said.inference.cache_miss.count == 2
    assert said.last_inference > 0
    assert cached.stats().success == 3
    read = {reading.family: reading.value for reading in cached.readings()}
    assert (read["nv_inference_request_success"], read["nv_inference_count"]) == (3, 2)
    assert (read["nv_cache_num_hits_per_model"], read["nv_cache_num_misses_per_model"]) == (1, 2)
    assert cast(Any, read["nv_cache_miss_summary_per_model"]).count == 2


@pytest.mark.parametrize(
    "other",
    [
        question([2.0]),
        question([[1.0]]),
        question([1.0], "FP32"),
        question([1.0], outputs=("Y",)),
        question([1.0], mode="fast"),
    ],
)
async def test_another_question_has_another_answer(other: InferRequest) -> None:
    model = Doubling()
    cached = CachedModel(model, ResponseCache(MUCH))
    for each in (question([1.0]), other, other, question([1.0], priority=1, timeout=5)):
        await ask(cached, each)
    assert model.asked == 2


async def test_a_model_that_checks_itself_is_asked_behind_the_cache() -> None:
    class Checking(Doubling):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(self_check=self, measured=self)

        async def unready_reason(self) -> str:
            return "it is closed"

    checked = CachedModel(Checking(), ResponseCache(MUCH)).capabilities.self_check
    assert checked is not None
    assert await checked.unready_reason() == "it is closed"
    assert CachedModel(Doubling(), ResponseCache(MUCH)).capabilities.self_check is None


async def test_a_tenant_does_not_hear_what_another_asked() -> None:
    model = Doubling()
    cached = CachedModel(model, ResponseCache(MUCH))
    for tenant in ("", "a", "b", "a", ""):
        await ask(cached, question([1.0]), tenant)
    assert model.asked == 3


class Repeating(Doubling):
    """Answers as often as its input says, in streams that end without a final response."""

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        self.asked += 1
        [given] = request.inputs.values()
        for number in range(int(given.data.item())):
            self.buffer[0] = number
            yield InferResponse((Tensor("Y", "FP64", (1,), self.buffer[:1]),))


@pytest.mark.parametrize(("count", "asked"), [(0, 2), (1, 1), (2, 2)])
async def test_only_a_single_response_is_kept(count: int, asked: int) -> None:
    model = Repeating()
    cached = CachedModel(model, ResponseCache(MUCH))
    for _ in range(2):
        async with aclosing(cached.infer(question(float(count)), RequestContext("test"))) as responses:
            assert [response.outputs[0].data.item() async for response in responses] == list(range(count))
    assert model.asked == asked


async def test_text_is_told_apart_by_its_elements_and_errors_are_not_kept() -> None:
    model = Doubling()
    cached = CachedModel(model, ResponseCache(MUCH))
    for texts in ([b"ab", b"c"], [b"a", b"bc"], [b"ab", b"c"]):
        with pytest.raises(CharoniaError, match="no numbers"):
            await ask(cached, question(texts, "BYTES"))
    assert model.asked == 3


async def test_models_share_the_cache_and_not_their_answers() -> None:
    cache = ResponseCache(MUCH)
    one, two = CachedModel(Doubling(), cache), CachedModel(Doubling(), cache)
    await ask(one, question())
    await ask(two, question())
    assert len(cache) == 2
    await one.unload()
    assert len(cache) == 1
    cache.check_integrity()
    await ask(two, question())
    assert two.statistics().inference.cache_hit.count == 1


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 40)), max_size=60))
def test_there_is_never_more_than_there_may_be(asked: list[tuple[int, int]]) -> None:
    cache, last = ResponseCache(4000), b""
    for name, size in asked:
        answer = InferResponse((Tensor.from_values("Y", "FP64", np.full(size * 10, float(name))),))
        last = bytes((name, size))
        found = cache.get("m", last)
        if found is not None:
            assert found.outputs[0].data.tolist() == [name] * size * 10
        cache.put("m", last, answer)
        cache.check_integrity()
        assert (cache.get("m", last) is not None) == (size * 80 + 512 <= 4000)
    cache.remove_owner("m")
    assert (len(cache), cache.used, cache.outstanding) == (0, 0, 4000)


@pytest.mark.parametrize("words", [["redis,host=x"], ["local"], ["local,size=0"], ["local,size=1k"], ["size=1"]])
def test_a_cache_that_cannot_be_is_refused_by_its_flag(words: list[str]) -> None:
    with pytest.raises(CharoniaError, match="--cache-config"):
        parse_cache_config(words)


async def test_a_config_says_which_models_answers_are_kept(tmp_path: Path) -> None:
    for name, more in (("kept", ENABLED), ("plain", "")):
        (tmp_path / name / "1").mkdir(parents=True)
        config = f'backend: "identity" max_batch_size: 1 {more}'
        tensors = "".join(f'{side} {{ name: "X" data_type: TYPE_FP32 dims: 1 }}' for side in ("input", "output"))
        (tmp_path / name / "config.pbtxt").write_text(config + tensors)
    catalog, cache = RepositoryCatalog([tmp_path]), parse_cache_config(["local,size=4096"])
    for caching, kept in ((cache, True), (None, False)):
        builder = ModelBuilder(cache=caching)
        services = ModelServices(InProcessGateway(builder=builder), asyncio.get_running_loop())
        made = {
            name: builder.prepare(source := catalog.read(name), source.versions[0], services).build(ignore_progress)
            for name in catalog.model_names()
        }
        assert [isinstance(made[name], CachedModel) for name in ("kept", "plain")] == [kept, False]


@pytest.mark.parametrize(
    ("more", "keeps"),
    [
        ("", True),
        ("sequence_batching {}", False),
        ("model_transaction_policy { decoupled: true }", False),
        ('backend: "charonia"', False),
    ],
)
def test_where_answers_cannot_be_kept_that_is_told(more: str, keeps: bool) -> None:
    config = parse_config_text(f"{ENABLED} {more}")
    assert is_response_cache_enabled(config) is keeps
    assert ("response_cache" in ignored_fields(config)) is not keeps
    assert "response_cache" in ignored_fields(config, caching=False)
