"""Models whose prompts have sounds write them down: in which form they are asked, and what of the answer is told."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from charonia.core.direct_stream import DirectStream
from charonia.core.errors import InvalidArgument, RequestTimeout, Unavailable
from charonia.core.media import MediaSource, PreparedMedium
from charonia.core.request import Conversation, FinishReason, GenerateChunk, GenerateRequest, TextWithMedia, Usage
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.core.speech import Speech
from charonia.engine.client.model_media import PromptMedia
from charonia.engine.client.prompted_transcriber import FORMS, PromptedTranscriber
from charonia.tokenization.media_text import MediaText

SOUND = MediaSource("audio", data=b"x", field="file")
SAID = ("language Eng", "lish<asr_te", "xt>So it ", "goes.")


class Asked:
    """A model that says what it is told, and remembers what it was asked."""

    def __init__(self, family: str, texts: tuple[str, ...] = SAID, end: FinishReason = FinishReason.STOP) -> None:
        self.texts, self.end = texts, end
        self.requests: list[GenerateRequest] = []
        self.timeouts: list[float] = []
        media: Any = self
        self.transcriber = PromptedTranscriber(media, FORMS[family], self.ask, lambda tenant: None, timeout=9.0)

    async def read(self, prompt: Any, context: RequestContext, salt: str, timeout: float) -> PromptMedia:
        self.timeouts.append(timeout)
        medium = PreparedMedium("audio", b"d", "<s>", {}, seconds=2.5)
        return PromptMedia(MediaText({"audio": "<s>"}, (("audio", "<s>"),)), {"audio": 1}, (medium,))

    def ask(self, request: GenerateRequest, context: RequestContext, media: Any) -> DirectStream[GenerateChunk]:
        self.requests.append(request)
        return DirectStream(lambda _: self.chunks())

    async def chunks(self) -> AsyncGenerator[GenerateChunk, None]:
        last = len(self.texts) - 1
        for index, text in enumerate(self.texts):
            end = self.end if index == last else None
            yield GenerateChunk(text=text, token_ids=(1,), usage=Usage(1, index), finish_reason=end)

    async def transcript(self, **speech: Any) -> str:
        request = GenerateRequest(id="r", speech=Speech(SOUND, **speech), sampling=SamplingParams(seed=3))
        chunks = [chunk async for chunk in self.transcriber.generate(request, RequestContext("audio"))]
        assert all(chunk.transcript is not None and chunk.transcript.duration == 2.5 for chunk in chunks)
        return "".join(chunk.text for chunk in chunks)


async def test_the_transcript_stands_behind_what_is_said_of_the_sound() -> None:
    asked = Asked("qwen3_asr")
    assert await asked.transcript(context=" Charon ") == "So it goes."
    [request] = asked.requests
    prompt = request.prompt
    assert isinstance(prompt, Conversation)
    assert [(message.role, message.content, message.media) for message in prompt.messages] == [
        ("system", "Charon", ()),
        ("user", "", (SOUND,)),
    ]
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (296, 0.0, 3)
    assert request.speech is None
    assert asked.timeouts == [9.0], "as a request has that says nothing of it"
    assert await Asked("qwen3_asr", ("So it ", "goes")).transcript() == "So it goes"


async def test_a_language_that_is_named_is_forced() -> None:
    asked = Asked("qwen3_asr", ("So ", "<asr_text> it goes"))
    assert await asked.transcript(language="de") == "So <asr_text> it goes"
    prompt = asked.requests[0].prompt
    assert isinstance(prompt, Conversation)
    assert prompt.messages[-1].content == "language German<asr_text>"
    assert prompt.continue_final_message
    other = Asked("voxtral", ("ja",))
    assert await other.transcript(language="de") == "ja"
    assert await other.transcript() == "ja"
    assert [request.prompt for request in other.requests] == [
        TextWithMedia(f"[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]", (SOUND,))
        for language in ("lang:de", "")
    ]


@pytest.mark.parametrize(
    ("family", "speech", "field"),
    [
        ("voxtral", {"context": "Charon"}, "prompt"),
        ("voxtral", {"translate": True}, "model"),
        ("qwen3_asr", {"timestamps": True}, "response_format"),
    ],
)
async def test_what_is_not_done_is_refused_by_name(family: str, speech: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await Asked(family).transcript(**speech)
    assert refusal.value.field == field


async def test_an_answer_that_breaks_off_is_no_transcript() -> None:
    with pytest.raises(RequestTimeout):
        await Asked("voxtral", end=FinishReason.TIMEOUT).transcript()
    with pytest.raises(Unavailable):
        await Asked("voxtral", end=FinishReason.ABORT).transcript()


async def test_other_requests_are_answered_as_ever() -> None:
    asked = Asked("voxtral", ("hi",))
    request = GenerateRequest(id="r", prompt="hello")
    [chunk] = [chunk async for chunk in asked.transcriber.generate(request, RequestContext("chat"))]
    assert (chunk.text, chunk.transcript, asked.requests) == ("hi", None, [request])
