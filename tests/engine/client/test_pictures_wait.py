"""Running streams get on while pictures wait for their encoder, through a real core process with the fake executor: the
encoder here is done with a picture only when streams have had so many tokens more."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from charonia.core.media import Encodable, MediaKind, MediaSource, PreparedMedium
from charonia.core.media_models import AlignedWindow, EncodedMedium, MediaFacts, MediaServices
from charonia.core.metrics import Reading
from charonia.core.model import MemoryNeed, ReservedMemory
from charonia.core.request import GenerateRequest, Prompt, TextWithMedia
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.engine.client.llm import LlmModel
from charonia.engine.client.model_media import ModelMedia
from charonia.engine.config import EngineConfig, FakeConfig
from charonia.processes.patient_work import patient_work

PLACE = 80
STREAMS, PICTURES, STEPS = 3, 5, 40


class Tokens:
    """Counts the tokens of all streams."""

    def __init__(self) -> None:
        self._count = 0
        self._more = asyncio.Condition()

    async def add(self) -> None:
        async with self._more:
            self._count += 1
            self._more.notify_all()

    async def more(self, count: int) -> None:
        """Return when streams have had so many tokens more."""
        wanted = self._count + count
        async with self._more:
            await asyncio.wait_for(self._more.wait_for(lambda: self._count >= wanted), 30)


class SlowEye:
    """A preparer and an encoder of pictures, of two places each, that streams must not wait for."""

    facts: Mapping[MediaKind, MediaFacts] = {"image": MediaFacts(f"w{PLACE}", (PLACE,), b"")}
    needs: Sequence[MemoryNeed] = ()

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.encoding = self.most = 0

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def check(self, media: Sequence[MediaSource]) -> None:
        pass

    async def prepare(self, medium: MediaSource, context: RequestContext) -> PreparedMedium:
        return PreparedMedium("image", medium.uuid.encode(), f"w{PLACE} w{PLACE}", {})

    async def encode(self, medium: Encodable, context: RequestContext, salt: str = "") -> EncodedMedium:
        with patient_work.pending():
            self.encoding += 1
            self.most = max(self.most, self.encoding)
            await self._tokens.more(STEPS)
            self.encoding -= 1
        return EncodedMedium(2, np.zeros((2, 4), np.float32).tobytes(), "float32")

    async def align(self, window: AlignedWindow, context: RequestContext) -> Sequence[int]:
        raise NotImplementedError

    def reserved_memory(self) -> ReservedMemory:
        return ReservedMemory(0, 0)

    def readings(self) -> Iterator[Reading]:
        yield from ()


async def tokens_of(model: LlmModel, prompt: Prompt, count: int) -> AsyncIterator[int]:
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    with RequestContext("test") as context:
        async with aclosing(
            model.generate(GenerateRequest(id="", prompt=prompt, sampling=sampling), context)
        ) as chunks:
            async for chunk in chunks:
                for token in chunk.token_ids:
                    yield token


@pytest.mark.parametrize("threads", [1, 64])
async def test_streams_get_on_while_pictures_wait(words: Path, threads: int) -> None:
    """Whether their steps leave time for the encoder or not; all pictures are answered, and streams are what they would
    have been."""
    tokens = Tokens()
    eye = SlowEye(tokens)
    fake = FakeConfig(vocab_size=100, max_model_len=64)
    config = EngineConfig(model=str(words), executor="fake", fake=fake, threads=threads)
    model = LlmModel("words", "1", config, media=ModelMedia(MediaServices(eye, eye)))

    async def stream(first: int) -> None:
        while True:
            expected = first
            async for token in tokens_of(model, (first,), 60):
                expected = (expected + 1) % 100
                assert token == expected
                await tokens.add()

    async def ask(number: int) -> list[int]:
        picture = MediaSource("image", uuid=str(number), field="image[0]")
        prompt = TextWithMedia(f"w{PLACE} w{number}", (picture,))
        return [token async for token in tokens_of(model, prompt, 2)]

    await model.load()
    streams = [asyncio.create_task(stream(first)) for first in range(1, 1 + STREAMS)]
    try:
        answers = await asyncio.gather(*map(ask, range(PICTURES)))
        assert not any(task.done() for task in streams)
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await model.unload()
    assert answers == [[number + 1, number + 2] for number in range(PICTURES)]
    assert eye.most == PICTURES
    assert not patient_work.waits
