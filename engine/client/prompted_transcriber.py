"""Writes down the sound of a request by a model whose prompts have sounds: it is asked in the form that its family was
trained with. Knows no protocol, and of the engine only that it answers prompts."""

import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple

from msgspec.structs import replace

from ...core.direct_stream import DirectStream
from ...core.errors import InvalidArgument, RequestTimeout, Unavailable
from ...core.request import (
    ChatMessage,
    Conversation,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Prompt,
    TextWithMedia,
)
from ...core.request_context import RequestContext
from ...core.sampling import SamplingParams
from ...core.speech import LANGUAGE_NAMES, Speech, Transcript
from .model_media import ModelMedia, PromptMedia

_TOKENS_A_SECOND, _LEAST_TOKENS = 16, 256
"""Tokens that a transcript may have: far more than anybody says, so that one that repeats itself ends."""

AskPrompted = Callable[[GenerateRequest, RequestContext, PromptMedia | None], DirectStream[GenerateChunk]]
"""Generates one sequence."""


class TranscriptForm(NamedTuple):
    """How a family is asked for a transcript."""

    prompt: Callable[[Speech], Prompt]
    """Raises `InvalidArgument` for what the family does not know."""
    marker: str = ""
    """What stands between what the model says of the sound and the transcript, where it says any."""


def _qwen3_asr(speech: Speech) -> Prompt:
    """A turn with the sound alone, after one of the system with words that may come; a language is forced by the
    answer's beginning."""
    system = (ChatMessage("system", speech.context.strip()),) if speech.context.strip() else ()
    user = ChatMessage("user", "", media=(speech.sound,))
    if not speech.language:
        return Conversation((*system, user))
    name = LANGUAGE_NAMES[speech.language].title()
    begun = ChatMessage("assistant", f"language {name}{_QWEN3_ASR_MARKER}")
    return Conversation((*system, user, begun), add_generation_prompt=False, continue_final_message=True)


def _voxtral(speech: Speech) -> Prompt:
    if speech.context.strip():
        raise InvalidArgument("prompt: this model takes none beside a sound that it writes down", field="prompt")
    language = f"lang:{speech.language}" if speech.language else ""
    return TextWithMedia(f"[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]", (speech.sound,))


_QWEN3_ASR_MARKER = "<asr_text>"
FORMS: Mapping[str, TranscriptForm] = {
    "qwen3_asr": TranscriptForm(_qwen3_asr, _QWEN3_ASR_MARKER),
    "voxtral": TranscriptForm(_voxtral),
}
"""By the `model_type` of families that were trained to write down sounds of their prompts."""


class PromptedTranscriber:
    """Answers the requests of one model, those for transcripts and all others. `check_room`: raises `QueueFull` where a
    request of that tenant would be refused. `timeout`: as of `Transcriber`."""

    def __init__(
        self,
        media: ModelMedia,
        form: TranscriptForm,
        ask: AskPrompted,
        check_room: Callable[[str], None],
        timeout: float = 0.0,
    ) -> None:
        self._media = media
        self._form = form
        self._ask = ask
        self._check_room = check_room
        self._timeout = timeout

    def generate(self, request: GenerateRequest, context: RequestContext) -> DirectStream[GenerateChunk]:
        """The chunks of the text; those of a transcript have one. Raises `InvalidArgument` for what the model does not
        do, and as what prepares, encodes and generates."""
        speech = request.speech
        if speech is None:
            return self._ask(request, context, None)
        if speech.translate:
            raise InvalidArgument("this model does not translate what it hears", field="model")
        if speech.timestamps:
            raise InvalidArgument("this model tells no times: it writes json and text", field="response_format")
        prompt = self._form.prompt(speech)
        return DirectStream(lambda _: self._transcribe(request, speech, prompt, context))

    async def _transcribe(
        self, request: GenerateRequest, speech: Speech, prompt: Prompt, context: RequestContext
    ) -> AsyncGenerator[GenerateChunk, None]:
        self._check_room(context.tenant)
        timeout = request.timeout or (0.0 if context.background else self._timeout)
        media = await self._media.read(prompt, context, request.cache_salt, timeout)
        assert media is not None, "a model that hears has a token for sounds"
        [sound] = media.prepared
        wanted = request.sampling
        sampling = SamplingParams(
            max_tokens=_LEAST_TOKENS + math.ceil(_TOKENS_A_SECOND * sound.seconds),
            temperature=wanted.temperature or 0.0,
            seed=wanted.seed,
        )
        question = replace(request, speech=None, prompt=prompt, sampling=sampling, lenient_limits=True)
        transcript = Transcript(speech.language, sound.seconds)
        text = _AfterMarker("" if speech.language else self._form.marker)
        async with aclosing(self._ask(question, context, media)) as stream:
            async for chunk in stream:
                if chunk.finish_reason is FinishReason.TIMEOUT:
                    raise RequestTimeout
                if chunk.finish_reason is FinishReason.ABORT:
                    raise Unavailable("the sound was not heard to its end")
                shown = text.add(chunk.text) + (text.end() if chunk.finish_reason is not None else "")
                yield replace(chunk, text=shown, transcript=transcript)


class _AfterMarker:
    """The part of a text behind the first marker in it; all of it, if it has none by its end."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def add(self, text: str) -> str:
        """What is known to belong to the part."""
        if not self._marker:
            return text
        self._held += text
        _, marker, after = self._held.partition(self._marker)
        if not marker:
            return ""
        self._marker = ""
        return after

    def end(self) -> str:
        return self._held if self._marker else ""
