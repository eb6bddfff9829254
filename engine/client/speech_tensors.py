"""The tensors of a model that writes sounds down, for v2's clients: a file goes in, text comes out."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import orjson

from ...core.direct_stream import DirectStream
from ...core.errors import InvalidArgument
from ...core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse
from ...core.request_context import RequestContext
from ...core.sampling import SamplingParams
from ...core.speech import Speech
from ...core.tensor import Tensor, TensorSpec
from .image_tensors import file_source
from .infer import GeneratingModel
from .request_parameters import decode_text

_AUDIO, _STREAM, _TEXT, _SEGMENTS = "audio", "stream", "text_output", "segments"


class _SpeechWishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says beside its sound, as tensors or as parameters."""

    language: str = ""
    prompt: str = ""
    translate: bool = False
    temperature: float | None = None
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False


class _SpeechCall(NamedTuple):
    request: GenerateRequest
    stream: bool
    segments: bool
    """Whether the segments are wanted, too."""


@dataclass(frozen=True, slots=True)
class SpeechLayout:
    """An `InferLayout`. The first output always comes, the other one where the request names it: JSON of the segments,
    with their times."""

    inputs: tuple[TensorSpec, ...] = (
        TensorSpec(_AUDIO, "BYTES", (1,)),
        TensorSpec("language", "BYTES", (1,), optional=True),
        TensorSpec("prompt", "BYTES", (1,), optional=True),
        TensorSpec("translate", "BOOL", (1,), optional=True),
        TensorSpec("temperature", "FP32", (1,), optional=True),
        TensorSpec(_STREAM, "BOOL", (1,), optional=True),
    )
    output_specs: tuple[TensorSpec, ...] = (TensorSpec(_TEXT, "BYTES", (1,)), TensorSpec(_SEGMENTS, "BYTES", (1,)))
    max_batch_size: int = 0
    decoupled: bool = True
    implied_stream: bool = True

    def infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> DirectStream[InferResponse]:
        """Raises as `LlmModel.infer`."""
        return DirectStream(lambda _: self._infer(request, context, model))

    async def _infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> AsyncGenerator[InferResponse, None]:
        call = _parse(request)
        chunks: list[GenerateChunk] = []
        async with aclosing(model.generate(call.request, context)) as stream:
            async for chunk in stream:
                if not call.stream:
                    chunks.append(chunk)
                elif chunk.text:
                    yield _response([chunk], call)
        if not call.stream:
            yield _response(chunks, call)


def _parse(request: InferRequest) -> _SpeechCall:
    """Raises `InvalidArgument` for a request without a sound, and for what is unknown or wrong; `field` names it."""
    audio = request.inputs.get(_AUDIO)
    if audio is None or audio.data.size != 1:
        raise InvalidArgument(f"{_AUDIO} must be one element, a file or the base64 of one", field=_AUDIO)
    [element] = audio.data.ravel()
    content = element.encode() if isinstance(element, str) else bytes(element)
    if not content:
        raise InvalidArgument(f"{_AUDIO} is empty", field=_AUDIO)
    tensors = {name: _value(tensor) for name, tensor in request.inputs.items()}
    wishes = _wishes({**request.parameters, **tensors})
    segments = _SEGMENTS in (request.outputs or ())
    return _SpeechCall(
        GenerateRequest(
            id=request.id,
            speech=Speech(
                file_source("audio", content, _AUDIO),
                language=wishes.language,
                translate=wishes.translate,
                context=wishes.prompt,
                timestamps=segments,
                no_speech=segments,
            ),
            sampling=SamplingParams(temperature=wishes.temperature, seed=wishes.seed),
            priority=wishes.priority,
            cache_salt=wishes.cache_salt,
        ),
        wishes.stream,
        segments,
    )


def _value(tensor: Tensor) -> Any:
    """The one element of an input."""
    if tensor.name == _AUDIO:
        return None
    if tensor.data.size != 1:
        raise InvalidArgument(f"{tensor.name} must be one element", field=tensor.name)
    [value] = tensor.data.ravel().tolist()
    return decode_text(tensor.name, value) if tensor.datatype == "BYTES" else value


def _wishes(members: Mapping[str, Any]) -> _SpeechWishes:
    try:
        return msgspec.convert({name: value for name, value in members.items() if name != _AUDIO}, _SpeechWishes)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
        raise InvalidArgument(f"the request's inputs and parameters: {error}", field=field) from None


def _response(chunks: Sequence[GenerateChunk], call: _SpeechCall) -> InferResponse:
    text = "".join(chunk.text for chunk in chunks)
    outputs = [_bytes(_TEXT, (text if call.stream else text.strip()).encode())]
    if call.segments:
        segments = [segment for chunk in chunks if chunk.transcript for segment in chunk.transcript.segments]
        shown = [{"start": part.start, "end": part.end, "text": part.text} for part in segments]
        outputs.append(_bytes(_SEGMENTS, orjson.dumps(shown)))
    return InferResponse(tuple(outputs))


def _bytes(name: str, value: bytes) -> Tensor:
    return Tensor.from_values(name, "BYTES", [value])
