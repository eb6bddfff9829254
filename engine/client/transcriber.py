"""Writes down the sound of a request: its windows side by side, each anew at a higher temperature while what is heard
makes no sense. Knows no protocol, and of the engine that it answers prompts."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from ...core.direct_stream import DirectStream
from ...core.errors import InvalidArgument, QueueFull, RequestTimeout, Unavailable
from ...core.media import PreparedMedium
from ...core.media_models import AlignedWindow, EncodedMedium
from ...core.request import FinishReason, GenerateChunk, GenerateRequest, Prompt, join_chunks
from ...core.request_context import RequestContext
from ...core.resolved_sampling import LogitsParams, TimestampRules
from ...core.sampling import SamplingParams
from ...core.speech import Speech, Transcript, TranscriptSegment, TranscriptWord
from ...scheduler.encoders.encoder_rows import EncoderRows
from ...tokenization.checkpoint_files import read_json
from ...tokenization.media_text import MediaText
from ...tokenization.speech_tokens import SECONDS_A_TIME, SpeechTokens, read_speech_tokens
from ...tokenization.speech_words import UNSPACED
from ...tokenization.tokenizer import AsyncTokenizer
from ..core.messages import AddRequest, CoreReady
from .add_request import NO_LOGITS_PARAMS
from .model_media import ModelMedia, PromptMedia
from .prompted_transcriber import FORMS, PromptedTranscriber
from .sounds_in_progress import HeldSound, SoundsInProgress, WindowsTogether
from .tokenizer_bundle import TokenizerBundle
from .transcript import (
    LEAST_LOGPROB,
    TEMPERATURES,
    HeardWindow,
    SoundWindow,
    TimedTokens,
    segment_of,
    split_times,
    words_of,
)

T = TypeVar("T")

_AHEAD = 8
"""Windows of one sound that are heard at a time."""
_FIRST_RETRY, _LONGEST_RETRY = 0.1, 2.0
"""Seconds between looks at a full queue, for a sound of which a part is heard already."""
_ENGLISH = "en"
_PLAIN = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    logprobs=0,
    skip_special_tokens=False,
)
"""What of a checkpoint's defaults never counts."""


class HeardPrompt(NamedTuple):
    """What a prompt of the decoder has beside its tokens."""

    encoded: EncoderRows
    rules: LogitsParams = NO_LOGITS_PARAMS
    """Of these `suppressed`, `suppressed_first`, `timestamps` and `reported` count."""
    reported: tuple[int, ...] = ()
    """Tokens whose log-probability is reported with each new one."""
    text: MediaText | None = None
    """Nothing stands for a sound in the text."""

    def place(self, add: AddRequest, _prompt: Prompt) -> AddRequest:
        """The request for a sequence that attends to the window."""
        sampling, rules = add.spec.sampling, self.rules
        logits = (sampling.logits or NO_LOGITS_PARAMS)._replace(
            suppressed=rules.suppressed,
            suppressed_first=rules.suppressed_first,
            timestamps=rules.timestamps,
            reported=rules.reported,
        )
        sampling = sampling._replace(
            logits=None if logits == NO_LOGITS_PARAMS else logits, logprob_token_ids=self.reported
        )
        spec = msgspec.structs.replace(add.spec, sampling=sampling, encoded=self.encoded)
        return msgspec.structs.replace(add, spec=spec)


PromptPlaces: TypeAlias = HeardPrompt | PromptMedia
"""What a prompt has beside its tokens: it is placed in the engine's request."""

AskDecoder: TypeAlias = Callable[[GenerateRequest, RequestContext, PromptPlaces | None], DirectStream[GenerateChunk]]
"""Generates one sequence."""


class _Task(NamedTuple):
    """One request, as all its windows have it."""

    request: GenerateRequest
    speech: Speech
    context: RequestContext
    previous: tuple[int, ...]
    """What comes before each transcript, as tokens."""
    held: HeldSound
    language: str = _ENGLISH
    windows: int = 1

    async def in_time(self, work: Awaitable[T]) -> T:
        """What `work` gives. Raises `RequestTimeout` if the request's time is over before."""
        return await self.context.in_time(work, self.request.timeout)


class _FirstToken(NamedTuple):
    """What the decoder makes of the beginning of a transcript."""

    token: int
    no_speech: float


class Transcriber:
    """Answers the requests of one model that writes down sounds. `length`: tokens of a prompt and its transcript.
    `check_room`: raises `QueueFull` where a request of that tenant would be refused. `timeout`: seconds that a request
    may take that says nothing of them."""

    def __init__(
        self,
        media: ModelMedia,
        tokens: SpeechTokens,
        tokenizer: AsyncTokenizer,
        length: int,
        ask: AskDecoder,
        check_room: Callable[[str], None],
        timeout: float = 0.0,
    ) -> None:
        self._media = media
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._length = length
        self._ask = ask
        self._check_room = check_room
        self._timeout = timeout
        self._sounds = SoundsInProgress()
        self._together = WindowsTogether()

    def generate(self, request: GenerateRequest, context: RequestContext) -> DirectStream[GenerateChunk]:
        """A chunk for each window, in order, and one at the end. Raises `InvalidArgument` for what the model does not
        know, and as what prepares, encodes and generates."""
        speech = request.speech
        if speech is None:
            message = f"model '{context.model}' writes down sounds, and nothing else: ask /v1/audio/transcriptions"
            raise InvalidArgument(message, field="model")
        return DirectStream(lambda _: self._transcribe(request, speech, context))

    async def _transcribe(
        self, request: GenerateRequest, speech: Speech, context: RequestContext
    ) -> AsyncGenerator[GenerateChunk, None]:
        self._check(speech)
        self._check_room(context.tenant)
        if not (request.timeout or context.background):
            request = msgspec.structs.replace(request, timeout=self._timeout)
        with self._sounds.admit(speech.sound) as held:
            previous = await self._previous(speech.context)
            task = _Task(request, speech, context, previous, held, speech.language or _ENGLISH)
            async with aclosing(self._write(task)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _write(self, task: _Task) -> AsyncGenerator[GenerateChunk, None]:
        waiting = deque(await task.in_time(self._media.prepare_sound(task.speech.sound, task.context)))
        task.held.add(sum(_bytes_of(medium) for _, medium in waiting))
        task = task._replace(windows=len(waiting))
        if self._tokens.languages and not task.speech.language:
            first = await self._first_token(task, await self._encode(waiting[0][1], task), by_language=True)
            codes = {token: code for code, token in self._tokens.languages.items()}
            task = task._replace(language=codes.get(first.token, _ENGLISH))
        running = deque[asyncio.Task[list[TranscriptSegment]]]()
        transcript = Transcript(task.language, waiting[-1][0].end)
        try:
            while waiting or running:
                while waiting and len(running) < _AHEAD:
                    running.append(asyncio.create_task(self._write_window(task, *waiting.popleft())))
                segments = await running[0]
                running.popleft()
                yield GenerateChunk(
                    text="".join(segment.text for segment in segments),
                    token_ids=tuple(token for segment in segments for token in segment.tokens),
                    usage=task.context.usage,
                    transcript=msgspec.structs.replace(transcript, segments=tuple(segments)),
                )
        finally:
            for window in running:
                window.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        yield GenerateChunk(
            text="", token_ids=(), usage=task.context.usage, finish_reason=FinishReason.STOP, transcript=transcript
        )

    def _check(self, speech: Speech) -> None:
        known = self._tokens.languages or {_ENGLISH: 0}
        if speech.language and speech.language not in known:
            named = ", ".join(known)
            message = f"language: this model does not know '{speech.language}', but {named}"
            raise InvalidArgument(message, field="language")
        if speech.translate and (self._tokens.translate is None or not self._tokens.languages):
            raise InvalidArgument("this model does not translate: it knows one language", field="model")

    async def _previous(self, text: str) -> tuple[int, ...]:
        """The end of what the client says came before, as the decoder gets it. Raises `InvalidArgument` for special
        tokens."""
        previous = self._tokens.previous
        if previous is None or not text.strip():
            return ()
        ids = await self._tokenizer.prompt_ids(f" {text.strip()}", special=False, kept=self._length // 2 - 1)
        if max(ids) >= self._tokens.end:
            raise InvalidArgument("prompt: it has a special token of the model", field="prompt")
        return (previous, *ids)

    async def _encode(self, window: PreparedMedium, task: _Task) -> EncoderRows:
        with self._together.encode(task.windows):
            encoded = await task.in_time(self._media.encode(window, task.context, task.request.cache_salt))
        return EncoderRows(encoded.length, window.digest, encoded.rows, encoded.dtype)

    async def _write_window(self, task: _Task, window: SoundWindow, medium: PreparedMedium) -> list[TranscriptSegment]:
        """The segments of what is heard in a window; none where nobody speaks."""
        rows = await self._encode(medium, task)
        task.held.release(_bytes_of(medium))
        del medium  # its features are not needed while it is heard
        await task.in_time(self._together.gather(task.windows))
        heard = await self._hear(task, rows)
        if heard.is_silence:
            return []
        tokens, first_time = heard.tokens, self._tokens.first_time
        parts = split_times(tokens, first_time) if task.speech.timestamps else [TimedTokens(0.0, None, tokens)]
        begins = await self._align(task, rows, window, heard) if task.speech.words and tokens else ()
        segments = []
        for part in parts:
            words = await self._words(task, part, begins, window) if begins else ()
            segments.append(segment_of(part, await self._text(part.tokens), window, heard, words))
        return [segment for segment in segments if segment.text.strip()]

    async def _align(self, task: _Task, rows: EncoderRows, window: SoundWindow, heard: HeardWindow) -> Sequence[int]:
        """The row of the encoder at which each token that was heard begins."""
        prompt = self._prompt(task)
        sounding = round((window.end - window.begin) / SECONDS_A_TIME)
        aligned = AlignedWindow(
            EncodedMedium(rows.length, rows.rows, rows.dtype),
            (*prompt, *heard.tokens),
            len(prompt),
            max(1, min(sounding, rows.length)),
        )
        return await task.in_time(self._media.align(aligned, task.context))

    async def _words(
        self, task: _Task, part: TimedTokens, begins: Sequence[int], window: SoundWindow
    ) -> tuple[TranscriptWord, ...]:
        tokens = {part.first + at: token for at, token in enumerate(part.tokens) if token < self._tokens.end}
        words = await self._tokenizer.split_words([*tokens.values()], task.language not in UNSPACED)
        return words_of(words, [*tokens], begins, window)

    async def _hear(self, task: _Task, rows: EncoderRows) -> HeardWindow:
        """What is heard at the lowest temperature at which that makes sense, or at the highest."""
        chosen = task.request.sampling.temperature
        no_speech: float | None = None
        if task.speech.no_speech:
            no_speech = (await self._first_token(task, rows)).no_speech
        for temperature in (chosen,) if chosen else TEMPERATURES:
            heard = await self._attempt(task, rows, temperature)
            if no_speech is None and heard.mean_logprob < LEAST_LOGPROB:
                no_speech = (await self._first_token(task, rows)).no_speech
            heard = heard._replace(no_speech=no_speech or 0.0)
            if heard.makes_sense:
                break
        return heard

    async def _attempt(self, task: _Task, rows: EncoderRows, temperature: float) -> HeardWindow:
        known = self._tokens
        rules = TimestampRules(known.first_time, known.end, known.no_timestamps, known.most_initial)
        answer = await self._generate(
            task,
            self._prompt(task),
            HeardPrompt(
                rows,
                LogitsParams(
                    suppressed=known.suppressed,
                    suppressed_first=known.suppressed_first,
                    timestamps=rules if task.speech.timestamps else None,
                    reported=True,
                ),
            ),
            msgspec.structs.replace(
                _PLAIN,
                max_tokens=max(1, min(self._length // 2, self._length - len(self._prompt(task)))),
                temperature=temperature,
            ),
        )
        tokens = tuple(token for token in answer.token_ids if token < known.end or token >= known.first_time)
        total = math.fsum(logprob.logprob for logprob in answer.logprobs)
        return HeardWindow(tokens, await self._text(tokens), temperature, total / (len(tokens) + 1))

    def _prompt(self, task: _Task) -> tuple[int, ...]:
        known = self._tokens
        prompt = [*task.previous, known.start]
        if known.languages:
            prompt.append(known.languages[task.language])
        work = known.translate if task.speech.translate else known.transcribe
        if known.languages and work is not None:
            prompt.append(work)
        if not task.speech.timestamps:
            prompt.append(known.no_timestamps)
        return tuple(prompt)

    async def _first_token(self, task: _Task, rows: EncoderRows, by_language: bool = False) -> _FirstToken:
        """The likeliest token behind the beginning of a transcript, among all or among the languages, and how likely it
        is that nobody speaks."""
        allowed = tuple(self._tokens.languages.values()) if by_language else None
        sampling = msgspec.structs.replace(_PLAIN, allowed_token_ids=allowed)
        prompt = (self._tokens.start,) if by_language else (*task.previous, self._tokens.start)
        answer = await self._generate(task, prompt, HeardPrompt(rows, reported=(self._tokens.no_speech,)), sampling)
        [logprob] = answer.logprobs
        return _FirstToken(answer.token_ids[0], math.exp(logprob.top[-1].logprob))

    async def _generate(
        self, task: _Task, prompt: tuple[int, ...], heard: HeardPrompt, sampling: SamplingParams
    ) -> GenerateChunk:
        """The whole answer to a prompt, once there is room for it."""
        sampling = msgspec.structs.replace(sampling, seed=task.request.sampling.seed or 0)
        request = msgspec.structs.replace(task.request, speech=None, prompt=prompt, sampling=sampling)
        pause = _FIRST_RETRY
        while True:
            try:
                self._check_room(task.context.tenant)
                break
            except QueueFull:  # what was heard so far is not given up
                left = task.context.seconds_left(request.timeout)
                if left <= 0:
                    raise RequestTimeout from None
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_RETRY)
        async with aclosing(self._ask(request, task.context, heard)) as stream:
            chunks = [chunk async for chunk in stream]
        if chunks and chunks[-1].finish_reason is FinishReason.TIMEOUT:
            raise RequestTimeout
        if not chunks or chunks[-1].finish_reason is FinishReason.ABORT:
            raise Unavailable("the sound was not heard to its end")
        return join_chunks(chunks)

    async def _text(self, tokens: tuple[int, ...]) -> str:
        return await self._tokenizer.decode([token for token in tokens if token < self._tokens.end])


def _bytes_of(medium: PreparedMedium) -> int:
    return sum(array.nbytes for array in medium.inputs.values())


def load_transcriber(
    media: ModelMedia,
    bundle: TokenizerBundle,
    engine: CoreReady,
    ask: AskDecoder,
    check_room: Callable[[str], None],
    timeout: float,
) -> Transcriber | PromptedTranscriber | None:
    """The transcriber over an engine; None of a model that was not trained to write down sounds. Raises as
    `read_speech_tokens`."""
    if not media.transcribes:
        config = read_json(Path(bundle.checkpoint) / "config.json") if "audio" in media.kinds else {}
        form = FORMS.get(str(config.get("model_type")))
        return None if form is None else PromptedTranscriber(media, form, ask, check_room, timeout)
    tokens = read_speech_tokens(Path(bundle.checkpoint), bundle.tokenizer, engine.vocab_size)
    return Transcriber(media, tokens, bundle.async_tokenizer, engine.max_model_len, ask, check_room, timeout)
