"""Sounds window by window over a decoder that says what it is told to: in order, again where it makes no sense, and
with nothing left running."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

from charonia.core.errors import InvalidArgument, QueueFull, RequestTimeout, Unavailable
from charonia.core.media import FEATURES, WINDOW_BOUNDS, MediaKind, MediaSource, PreparedMedium
from charonia.core.media_models import AlignedWindow, EncodedMedium, MediaFacts, MediaServices
from charonia.core.request import FinishReason, GenerateChunk, GenerateRequest, Usage
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.core.speech import Speech
from charonia.engine.client import sounds_in_progress
from charonia.engine.client.model_media import ModelMedia
from charonia.engine.client.transcriber import HeardPrompt, Transcriber
from charonia.tokenization.speech_tokens import SpeechTokens, read_speech_tokens
from charonia.tokenization.tokenizer import AsyncTokenizer, Tokenizer
from tests.hearing_models import write_whisper_tokenizer
from tests.scored_tokens import scored
from tests.waiting import until

LENGTH = 64


class Parts:
    """What prepares and encodes: as many windows of a second as the file has bytes."""

    facts: Mapping[MediaKind, MediaFacts] = {"audio": MediaFacts("", (), b"")}

    def __init__(self) -> None:
        self.aligned: list[AlignedWindow] = []

    def check(self, media: Any) -> None: ...

    async def prepare(self, medium: MediaSource, context: RequestContext) -> PreparedMedium:
        count = len(medium.data)
        bounds = np.array([[index, index + 1] for index in range(count)], np.float64)
        features = np.arange(count, dtype=np.float32).reshape(count, 1, 1)
        return PreparedMedium("audio", medium.data, "", {FEATURES: features, WINDOW_BOUNDS: bounds})

    async def encode(self, medium: PreparedMedium, context: RequestContext, salt: str = "") -> EncodedMedium:
        return EncodedMedium(100, medium.inputs[FEATURES].tobytes(), "float32")

    async def align(self, window: AlignedWindow, context: RequestContext) -> list[int]:
        self.aligned.append(window)
        return [*range(10, 10 + len(window.tokens) - window.prompt)]


class Answer(NamedTuple):
    text: str = " so it goes"
    logprob: float = -0.1
    no_speech: float = 0.0


class Decoder:
    """Answers a prompt with what `answer` says for its window and temperature."""

    def __init__(self, tokenizer: Tokenizer, known: SpeechTokens) -> None:
        self.answer: Callable[[int, float], Answer] = lambda window, temperature: Answer()
        self.language = "de"
        self.asked: list[tuple[int, GenerateRequest, HeardPrompt]] = []
        self.running = self.most_running = 0
        self.full = 0
        self.hang = False
        self.reason = FinishReason.STOP
        self._tokenizer, self._known = tokenizer, known

    def check_room(self, tenant: str) -> None:
        if self.full and self.asked:
            self.full -= 1
            raise QueueFull("full", retry_after=1.0)

    async def ask(
        self, request: GenerateRequest, context: RequestContext, heard: HeardPrompt
    ) -> AsyncGenerator[GenerateChunk, None]:
        window = int(np.frombuffer(heard.encoded.rows, np.float32)[0])
        self.asked.append((window, request, heard))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001 * (5 - window % 5))  # the later ones are ready first
            if self.hang:
                await asyncio.Event().wait()
            yield self._chunk(self.answer(window, request.sampling.temperature or 0.0), request, heard)
        finally:
            self.running -= 1

    def _chunk(self, answer: Answer, request: GenerateRequest, heard: HeardPrompt) -> GenerateChunk:
        if heard.reported:
            ids = [self._known.languages[self.language]]
            assert heard.reported == (self._known.no_speech,)
            named = self._known.no_speech, "", math.log(answer.no_speech or 1e-9)
            logprobs = [scored(ids[0], "", -0.5, named)]
        else:
            ids = [*self._tokenizer.encode(answer.text, special=False), self._known.end]
            logprobs = [scored(token, "", answer.logprob) for token in ids]
        return GenerateChunk(
            text="", token_ids=tuple(ids), usage=Usage(1, 1), finish_reason=self.reason, logprobs=tuple(logprobs)
        )


class Hearing(NamedTuple):
    decoder: Decoder
    transcriber: Transcriber
    known: SpeechTokens
    parts: Parts

    async def chunks(
        self, data: bytes = b"a", temperature: float | None = None, timeout: float = 0.0, **speech: Any
    ) -> list[GenerateChunk]:
        request = GenerateRequest(
            id="x",
            speech=Speech(MediaSource("audio", data, field="file"), **speech),
            sampling=SamplingParams(temperature=temperature),
            timeout=timeout,
        )
        async with aclosing(self.transcriber.generate(request, RequestContext("test"))) as stream:
            return [chunk async for chunk in stream]


@pytest_asyncio.fixture
async def hearing(tmp_path: Path) -> Hearing:
    write_whisper_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    known = read_speech_tokens(tmp_path, tokenizer, 4096)
    decoder, parts = Decoder(tokenizer, known), Parts()
    services: Any = MediaServices(parts, parts, ("audio",), attended=True)  # type: ignore[arg-type]
    ask: Any = decoder.ask
    room = decoder.check_room
    hearing = Transcriber(ModelMedia(services), known, AsyncTokenizer(tokenizer), LENGTH, ask, room)
    return Hearing(decoder, hearing, known, parts)


async def test_the_time_of_a_request_may_be_over_before_it_is_heard(
    hearing: Hearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def hang(*args: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("")

    for part, name in ((hearing.transcriber._media, "encode"), (hearing.transcriber._together, "gather")):
        with monkeypatch.context() as patched:
            patched.setattr(part, name, hang)
            with pytest.raises(RequestTimeout):
                await hearing.chunks(b"ab", language="en", timeout=0.01)
    assert len(ended) == 4, "both windows of both sounds are given up"
    assert not hearing.decoder.asked
    assert len(await hearing.chunks(b"ab", language="en", timeout=60.0)) == 3


async def test_windows_come_in_order_and_eight_at_a_time(hearing: Hearing) -> None:
    hearing.decoder.answer = lambda window, _: Answer(f" word {window}")
    chunks = await hearing.chunks(b"a" * 20, language="en")
    assert [chunk.text for chunk in chunks] == [*(f" word {window}" for window in range(20)), ""]
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert hearing.decoder.most_running == 8
    transcript = chunks[5].transcript
    assert transcript is not None
    assert (transcript.language, transcript.duration) == ("en", 20.0)
    assert [(part.start, part.end, part.window) for part in transcript.segments] == [(5.0, 6.0, 5.0)]


async def test_the_first_window_tells_the_language_once(hearing: Hearing) -> None:
    """Whatever is said to have come before."""
    await hearing.chunks(context="so it goes")
    assert hearing.decoder.asked.pop(0)[1].prompt == (hearing.known.start,)
    hearing.decoder.asked.clear()
    chunks = await hearing.chunks(b"aaa")
    (window, first, _), *others = hearing.decoder.asked
    assert (window, first.prompt, first.sampling.max_tokens) == (0, (hearing.known.start,), 1)
    assert first.sampling.allowed_token_ids == tuple(hearing.known.languages.values())
    known = hearing.known
    expected = (known.start, known.languages["de"], known.transcribe, known.no_timestamps)
    assert [request.prompt for _, request, _ in others] == [expected] * 3
    assert chunks[0].transcript is not None
    assert chunks[0].transcript.language == "de"


async def test_a_prompt_has_what_came_before_and_the_work(hearing: Hearing) -> None:
    known = hearing.known
    await hearing.chunks(language="es", translate=True, timestamps=True, context="so it goes " * 40)
    [(_, request, heard)] = hearing.decoder.asked
    prompt = list(request.prompt)
    assert prompt[0] == known.previous
    assert len(prompt) == 1 + (LENGTH // 2 - 1) + 3
    assert prompt[-3:] == [known.start, known.languages["es"], known.translate]
    assert request.sampling.max_tokens == LENGTH - len(prompt)
    assert heard.rules.timestamps is not None
    assert (heard.rules.timestamps.begin, heard.rules.timestamps.end) == (known.first_time, known.end)
    assert heard.rules.reported


async def test_words_have_times_where_they_are_asked_for(hearing: Hearing) -> None:
    hearing.decoder.answer = lambda window, _: Answer(" so it goes." if window else "")
    first, second, _ = await hearing.chunks(b"ab", language="en", timestamps=True, words=True)
    [aligned] = hearing.parts.aligned
    assert first.transcript is not None, "a window in which nothing was heard is not aligned"
    assert second.transcript is not None
    assert (aligned.prompt, aligned.sounding, aligned.encoded.length) == (3, 50, 100)
    [segment] = second.transcript.segments
    assert aligned.tokens[3:] == segment.tokens
    assert "".join(word.text for word in segment.words) == segment.text == " so it goes."
    assert [word.text for word in segment.words] == [" so", " it", " goes."]
    assert segment.words[0].start == 1.0
    assert [word.start for word in segment.words[1:]] == [word.end for word in segment.words[:-1]]
    assert segment.words[-1].end == 1.0 + 0.02 * (9 + len(segment.tokens))
    await hearing.chunks(language="en", timestamps=True)
    assert len(hearing.parts.aligned) == 1


async def test_what_makes_no_sense_is_heard_anew_and_warmer(hearing: Hearing) -> None:
    def answer(window: int, temperature: float) -> Answer:
        if temperature < 0.3:
            return Answer(" no no no no" * 30) if temperature else Answer(logprob=-2.0, no_speech=0.3)
        return Answer(" yes")

    hearing.decoder.answer = answer
    chunks = await hearing.chunks(language="en")
    assert chunks[0].text == " yes"
    temperatures = [request.sampling.temperature for _, request, heard in hearing.decoder.asked if not heard.reported]
    assert temperatures == [0.0, 0.2, 0.4]
    assert chunks[0].transcript is not None
    assert chunks[0].transcript.segments[0].temperature == 0.4
    hearing.decoder.answer = lambda window, temperature: Answer(f" at {temperature}", logprob=-2.0)
    assert (await hearing.chunks(language="en"))[0].text == " at 1.0"  # the last one counts, whatever it is
    assert (await hearing.chunks(language="en", temperature=0.6))[0].text == " at 0.6"


async def test_where_nobody_speaks_nothing_is_written(hearing: Hearing) -> None:
    hearing.decoder.answer = lambda window, _: Answer(" thanks for watching", -2.0, 0.9) if window == 1 else Answer()
    chunks = await hearing.chunks(b"abc", language="en")
    assert [chunk.text for chunk in chunks] == [" so it goes", "", " so it goes", ""]
    hearing.decoder.answer = lambda window, _: Answer(no_speech=0.9)  # and yet its words are likely
    [chunk, _] = await hearing.chunks(language="en", no_speech=True)
    assert chunk.transcript is not None
    assert chunk.transcript.segments[0].no_speech == pytest.approx(0.9)


async def test_a_queue_that_is_full_meanwhile_is_waited_for(hearing: Hearing) -> None:
    hearing.decoder.full = 3
    assert (await hearing.chunks(b"abc", language="en"))[-1].finish_reason is FinishReason.STOP
    hearing.decoder.full = 1
    with pytest.raises(QueueFull):  # nothing of it is heard yet
        await hearing.chunks(language="en")


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.TIMEOUT, RequestTimeout), (FinishReason.ABORT, Unavailable)]
)
async def test_a_window_that_is_not_heard_to_its_end_is_an_error(
    hearing: Hearing, reason: FinishReason, error: type[Exception]
) -> None:
    hearing.decoder.reason = reason
    with pytest.raises(error):
        await hearing.chunks(b"ab", language="en")


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_request_waits_for_room_no_longer_than_it_may(hearing: Hearing, says_so: bool) -> None:
    """A window whose turn does not come, since others are always first."""
    hearing.decoder.full = 1 << 30
    if not says_so:
        hearing.transcriber._timeout = 0.01
    with pytest.raises(RequestTimeout):
        await hearing.chunks(b"ab", language="en", timeout=0.01 if says_so else 0.0)
    assert hearing.decoder.running == 0


async def test_sounds_in_progress_have_a_budget(hearing: Hearing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their number, and of the bytes of their files and of the features that are not encoded yet: each window's are
    freed once it is encoded."""
    hearing.decoder.hang = True
    monkeypatch.setattr(sounds_in_progress, "_MOST_SOUNDS", 2)
    monkeypatch.setattr(sounds_in_progress, "_MOST_BYTES", 100)
    sounds = [asyncio.create_task(hearing.chunks(b"a" * 12, language="en"))]
    await until(lambda: hearing.decoder.running == 8)
    assert hearing.transcriber._sounds._bytes == 12 + 4 * 4
    with pytest.raises(QueueFull, match="1 sounds in progress hold 0 MiB already"):  # 15 bytes, and 60 of features
        await hearing.chunks(b"a" * 15, language="en")
    sounds.append(asyncio.create_task(hearing.chunks(b"a", language="en")))
    await until(lambda: hearing.decoder.running == 9)
    with pytest.raises(QueueFull, match="2 sounds are in progress already"):
        await hearing.chunks(language="en")
    for sound in sounds:
        sound.cancel()
    await asyncio.gather(*sounds, return_exceptions=True)
    hearing.decoder.hang = False
    assert await hearing.chunks(b"a" * 200, language="en")  # one alone may be larger
    assert hearing.transcriber._sounds._bytes == hearing.transcriber._sounds._count == 0


async def test_of_a_long_prompt_the_end_counts(hearing: Hearing) -> None:
    await hearing.chunks(language="en", context="so it goes " * 5000 + "and on")
    await hearing.chunks(language="en", context="so it goes " * 40 + "and on")
    (_, long, _), (_, short, _) = hearing.decoder.asked
    assert long.prompt == short.prompt


async def test_who_leaves_leaves_nothing_running(hearing: Hearing) -> None:
    hearing.decoder.hang = True
    task = asyncio.create_task(hearing.chunks(b"a" * 20, language="en"))
    await until(lambda: hearing.decoder.running == 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert hearing.decoder.running == 0


@pytest.mark.parametrize(
    ("speech", "fault"),
    [
        ({"language": "ha"}, "language: this model does not know 'ha', but en, zh, de, es"),
        ({"context": "a <|startoftranscript|>"}, "prompt: it has a special token of the model"),
    ],
)
async def test_what_the_model_does_not_know_is_refused(hearing: Hearing, speech: Any, fault: str) -> None:
    with pytest.raises(InvalidArgument, match=fault):
        await hearing.chunks(**speech)
    with pytest.raises(InvalidArgument, match="writes down sounds, and nothing else"):
        hearing.transcriber.generate(GenerateRequest(id="x", prompt="hello"), RequestContext("test"))
    assert not hearing.decoder.asked
