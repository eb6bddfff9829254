"""Sounds among the tensors of v2's clients."""

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.media import MediaSource
from charonia.core.request import FinishReason, GenerateChunk, GenerateRequest, InferRequest, Usage
from charonia.core.request_context import RequestContext
from charonia.core.speech import Speech, Transcript, TranscriptSegment, TranscriptWord
from charonia.core.tensor import Tensor
from charonia.engine.client.speech_tensors import SpeechLayout

SOUND = b"RIFF\0\xff"


class Model:
    """Hears two windows."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[GenerateChunk, None]:
        self.asked.append(request)
        for start, text in ((0.0, " so"), (30.0, ""), (60.0, " it goes")):
            words = tuple(TranscriptWord(f" {word}", start, start + 0.5) for word in text.split())
            part = TranscriptSegment(start, start + 1, text, (), 0.0, 0.0, 1.0, 0.0, start, words)
            transcript = Transcript("en", 61.0, (part,) if text else ())
            yield GenerateChunk(text=text, token_ids=(), usage=Usage(1, 1), transcript=transcript)
        yield GenerateChunk(text="", token_ids=(), usage=Usage(1, 1), finish_reason=FinishReason.STOP)


def tensor(name: str, value: Any) -> Tensor:
    kinds = {bool: "BOOL", float: "FP32", str: "BYTES", bytes: "BYTES"}
    return Tensor.from_values(name, kinds[type(value)], [value.encode() if isinstance(value, str) else value])


async def answers(
    model: Model, outputs: tuple[str, ...] | None = None, context: RequestContext | None = None, **inputs: Any
) -> list[dict[str, bytes]]:
    context = context or RequestContext("infer")
    parameters = inputs.pop("parameters", {})
    tensors = {name: tensor(name, value) for name, value in inputs.items()}
    request = InferRequest(id="r", inputs=tensors, outputs=outputs, parameters=parameters)
    asked: Any = model
    async with aclosing(SpeechLayout().infer(request, context, asked)) as stream:
        return [{output.name: output.data.ravel()[0] for output in response.outputs} async for response in stream]


async def test_a_file_goes_in_and_text_comes_out() -> None:
    model = Model()
    assert await answers(model, audio=SOUND, language="de", translate=True, temperature=0.5) == [
        {"text_output": b"so it goes"}
    ]
    [request] = model.asked
    assert request.speech == Speech(MediaSource("audio", SOUND, field="audio"), language="de", translate=True)
    assert (request.id, request.sampling.temperature) == ("r", 0.5)


async def test_base64_parameters_and_segments() -> None:
    model = Model()
    text = base64.b64encode(SOUND)
    [answer] = await answers(model, ("text_output", "segments"), audio=text, parameters={"prompt": "Ada", "seed": 3})
    assert orjson.loads(answer["segments"]) == [
        {"start": 0.0, "end": 1.0, "text": " so"},
        {"start": 60.0, "end": 61.0, "text": " it goes"},
    ]
    speech = model.asked[0].speech
    assert speech is not None
    assert speech.sound.url == f"data:;base64,{text.decode()}"
    assert (speech.context, speech.timestamps, model.asked[0].sampling.seed) == ("Ada", True, 3)


async def test_words_of_translations_are_refused_as_openai_s_are() -> None:
    model = Model()
    with pytest.raises(InvalidArgument, match="words: times of words are of transcriptions alone") as refusal:
        await answers(model, ("words",), audio=SOUND, translate=True)
    assert refusal.value.field == "translate"
    assert model.asked == []


async def test_words_come_where_they_are_named() -> None:
    model = Model()
    [answer] = await answers(model, ("text_output", "words"), audio=SOUND)
    assert answer.keys() == {"text_output", "words"}
    assert orjson.loads(answer["words"]) == [
        {"word": "so", "start": 0.0, "end": 0.5},
        {"word": "it", "start": 60.0, "end": 60.5},
        {"word": "goes", "start": 60.0, "end": 60.5},
    ]
    speech = model.asked[0].speech
    assert speech is not None
    assert (speech.timestamps, speech.words, speech.no_speech) == (True, True, False)


@pytest.mark.parametrize("language", ["EN", "English", "en"])
async def test_parameters_are_those_of_language_models(language: str) -> None:
    """Triton's `timeout` is in microseconds; what means nothing to the model is ignored, and the client told."""
    model, context = Model(), RequestContext("infer")
    parameters = {"timeout": 1_500_000, "priority": 2, "sequence_id": 3, "triton_x": 1, "volume": 3, "seed": 3.0}
    await answers(model, context=context, audio=SOUND, language=language, parameters=parameters)
    [request] = model.asked
    assert (request.timeout, request.priority, request.sampling.seed) == (1.5, 2, 3)
    assert request.speech is not None
    assert request.speech.language == "en"
    assert context.warnings == ["ignored: volume"]


async def test_a_stream_has_what_each_window_says() -> None:
    streamed = await answers(Model(), audio=SOUND, stream=True)
    assert streamed == [{"text_output": b" so"}, {"text_output": b" it goes"}]


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({}, "audio"),
        ({"audio": b""}, "audio"),
        ({"audio": SOUND, "parameters": {"langauge": "de"}}, "langauge"),
        ({"audio": SOUND, "language": "klingon"}, "language"),
        ({"audio": SOUND, "temperature": 1.5}, "temperature"),
        ({"audio": SOUND, "parameters": {"timeout": -1}}, "timeout"),
        ({"audio": SOUND, "parameters": {"language": 3}}, "language"),
        ({"audio": SOUND, "language": b"\xff"}, "language"),
    ],
)
async def test_what_is_wrong_is_named(inputs: Any, field: str) -> None:
    model = Model()
    with pytest.raises(InvalidArgument) as refusal:
        await answers(model, **inputs)
    assert refusal.value.field == field
    assert not model.asked
