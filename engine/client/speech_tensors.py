"""The tensors of a model that writes sounds down, for v2's clients: a file goes in, text comes out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson

from ...core.direct_stream import DirectStream
from ...core.errors import InvalidArgument
from ...core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse
from ...core.request_context import RequestContext
from ...core.sampling import SamplingParams
from ...core.speech import Speech, language_code
from ...core.tensor import Tensor, TensorSpec
from .infer import GeneratingModel
from .media_tensors import file_source
from .request_parameters import Microseconds, decode_text, one_element, parse_fields

_AUDIO, _STREAM, _TEXT, _SEGMENTS, _WORDS = "audio", "stream", "text_output", "segments", "words"


class _SpeechParameters(msgspec.Struct, frozen=True):
    """What a request says beside its sound, as tensors or as parameters."""

    language: str = ""
    prompt: str = ""
    translate: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout: Microseconds = 0
    stream: bool = False


class _SpeechCall(NamedTuple):
    request: GenerateRequest
    stream: bool
    segments: bool
    """Whether the segments are wanted, too."""
    words: bool
    """Whether the words are wanted, too."""


@dataclass(frozen=True, slots=True)
class SpeechLayout:
    """An `InferLayout`. The first output always comes, the others where the request names them: JSON of the segments,
    and of the words, with their times."""

    inputs: tuple[TensorSpec, ...] = (
        TensorSpec(_AUDIO, "BYTES", (1,)),
        TensorSpec("language", "BYTES", (1,), optional=True),
        TensorSpec("prompt", "BYTES", (1,), optional=True),
        TensorSpec("translate", "BOOL", (1,), optional=True),
        TensorSpec("temperature", "FP32", (1,), optional=True),
        TensorSpec(_STREAM, "BOOL", (1,), optional=True),
    )
    output_specs: tuple[TensorSpec, ...] = tuple(TensorSpec(name, "BYTES", (1,)) for name in (_TEXT, _SEGMENTS, _WORDS))
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
        call = _parse(request, context)
        chunks: list[GenerateChunk] = []
        async with aclosing(model.generate(call.request, context)) as stream:
            async for chunk in stream:
                if not call.stream:
                    chunks.append(chunk)
                elif chunk.text:
                    yield _response([chunk], call)
        if not call.stream:
            yield _response(chunks, call)


def _parse(request: InferRequest, context: RequestContext) -> _SpeechCall:
    """Raises `InvalidArgument` for a request without a sound, and for what is wrong; `field` names it. The client is
    told what is unknown."""
    audio = request.inputs.get(_AUDIO)
    if audio is None or audio.data.size != 1:
        raise InvalidArgument(f"{_AUDIO} must be one element, a file or the base64 of one", field=_AUDIO)
    [element] = audio.data.ravel()
    content = element.encode() if isinstance(element, str) else bytes(element)
    if not content:
        raise InvalidArgument(f"{_AUDIO} is empty", field=_AUDIO)
    tensors = {name: _value(tensor) for name, tensor in request.inputs.items() if name != _AUDIO}
    ignored = list[str]()
    parameters = parse_fields({**request.parameters, **tensors}, _SpeechParameters, ignored)
    if ignored:
        context.warn(f"ignored: {', '.join(sorted(ignored))}")
    segments, words = (name in (request.outputs or ()) for name in (_SEGMENTS, _WORDS))
    if words and parameters.translate:
        raise InvalidArgument(f"{_WORDS}: times of words are of transcriptions alone", field="translate")
    return _SpeechCall(
        GenerateRequest(
            id=request.id,
            speech=Speech(
                file_source("audio", content, _AUDIO),
                language=language_code(parameters.language),
                translate=parameters.translate,
                context=parameters.prompt,
                timestamps=segments or words,
                no_speech=segments,
                words=words,
            ),
            sampling=SamplingParams(temperature=parameters.temperature, seed=parameters.seed),
            priority=parameters.priority,
            cache_salt=parameters.cache_salt,
            timeout=parameters.timeout / 1e6,
        ),
        parameters.stream,
        segments,
        words,
    )


def _value(tensor: Tensor) -> Any:
    """The one element of an input."""
    value = one_element(tensor)
    return decode_text(tensor.name, value) if tensor.datatype == "BYTES" else value


def _response(chunks: Sequence[GenerateChunk], call: _SpeechCall) -> InferResponse:
    text = "".join(chunk.text for chunk in chunks)
    outputs = [_bytes(_TEXT, (text if call.stream else text.strip()).encode())]
    segments = [segment for chunk in chunks if chunk.transcript for segment in chunk.transcript.segments]
    if call.segments:
        shown = [{"start": part.start, "end": part.end, "text": part.text} for part in segments]
        outputs.append(_bytes(_SEGMENTS, orjson.dumps(shown)))
    if call.words:
        words = (word for segment in segments for word in segment.words)
        timed = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
        outputs.append(_bytes(_WORDS, orjson.dumps(timed)))
    return InferResponse(tuple(outputs))


def _bytes(name: str, value: bytes) -> Tensor:
    return Tensor.from_values(name, "BYTES", [value])
