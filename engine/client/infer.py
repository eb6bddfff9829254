"""A language model behind v2's infer: tensors and parameters become a generation, and its chunks become responses.

The names are those of Triton's TensorRT-LLM and vLLM back ends. Knows nothing of engines or tokenizers.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import orjson

from ...core.direct_stream import DirectStream, relay
from ...core.errors import InvalidArgument
from ...core.gateway import ResponseStream
from ...core.model import ModelConfig
from ...core.request import (
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    Prompt,
    TextWithMedia,
    Usage,
    join_chunks,
)
from ...core.request_context import RequestContext
from ...core.sampling import TokenLimit
from ...core.tasks import RequestTaskGroup, merge_streams
from ...core.tensor import Tensor, TensorSpec
from ..core.messages import CoreReady
from .media_tensors import MEDIA_NAMES, read_media, refuse_media
from .request_parameters import ResponseOptions, decode_text, parse_request_parameters, text_of

Chunks = ResponseStream[GenerateChunk]


class GeneratingModel(Protocol):
    """The language model that a layout asks: `LlmModel`. `info`: its engine's sizes."""

    @property
    def info(self) -> CoreReady: ...

    @property
    def config(self) -> ModelConfig: ...

    def generate(self, request: GenerateRequest, context: RequestContext) -> Chunks: ...

    def cancel(self, request_id: str) -> None:
        """End the generations of all requests with this id; their readers get `Cancelled`."""


class InferLayout(Protocol):
    """The tensors of a language model for v2's clients. `implied_stream`: see `ModelConfig`."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def decoupled(self) -> bool: ...

    @property
    def implied_stream(self) -> bool: ...

    def infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> ResponseStream[InferResponse]:
        """Raises as `LlmModel.infer` does."""


OutputValues: TypeAlias = Callable[[Sequence[GenerateChunk], Sequence[float]], Any]
"""Makes an output's elements from a chunk of each answer, and the sums of the logprobs of all its tokens so far."""


class OutputTensor(NamedTuple):
    """An output that a language model may give, and what makes its elements."""

    spec: TensorSpec
    values: OutputValues


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors of a language model, as one kind of repository has them."""

    inputs: tuple[TensorSpec, ...]
    """An input that is no prompt is a parameter of its name."""
    outputs: tuple[OutputTensor, ...]
    """The first always comes, the others when a request names them or has a parameter `return_...`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the checkpoint does not choose, by our own names."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that no model of the layout has, with the message for each."""
    echoes: bool = False
    """Whether a whole answer begins with the prompt, unless the request says otherwise."""
    implied_stream: bool = True
    """See `ModelConfig`."""
    max_batch_size: int = field(default=0, init=False)
    decoupled: bool = field(default=True, init=False)

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(output.spec for output in self.outputs)

    def infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> DirectStream[InferResponse]:
        return DirectStream(partial(self._infer, request, context, model))

    async def _infer(
        self,
        request: InferRequest,
        context: RequestContext,
        model: GeneratingModel,
        output: DirectStream[InferResponse],
    ) -> AsyncGenerator[InferResponse, None]:
        refuse_media(request.parameters, model.config)
        parsed = parse_infer_request(request, self, TokenLimit(model.info.max_model_len))
        if parsed.ignored:
            context.warn(f"ignored: {', '.join(parsed.ignored)}")
        streams = [model.generate(generation, context) for generation in parsed.requests]
        if not parsed.options.stream:
            yield await complete_response(parsed, streams)
            return
        responses = StreamedResponses(parsed.outputs, len(streams))
        if len(streams) == 1:
            async with aclosing(relay(streams[0], responses.build_response, output, responses.are_text)) as relayed:
                async for relayed_response in relayed:
                    yield relayed_response
            return
        async with aclosing(merge_streams(streams)) as merged:
            async for number, chunk in merged:
                if (response := responses.build_response(chunk, number)) is not None:
                    yield response


_TEXT = "text_output"
_PROMPTS = {"text_input", "input_ids", *MEDIA_NAMES}
_SAMPLING_PARAMETERS = "sampling_parameters"
_LOG_PROBS = {"cum_log_probs", "output_log_probs"}
_LOGPROBS = {*_LOG_PROBS, "cumulative_logprob"}

_COUNT_TOKENS = {"output_ids", "output_log_probs", "num_output_tokens", "logprobs"}
"""Outputs that would lose tokens if a response without text were left out."""

_READ_AT_ONCE = 1 << 16
"""Token ids that are converted in any case, which costs little; more only where the model's length allows them."""


class ParsedInferRequest(NamedTuple):
    """A v2 request to a language model, parsed."""

    requests: tuple[GenerateRequest, ...]
    """One generation or several for the same prompt."""
    options: ResponseOptions
    outputs: tuple[OutputTensor, ...]
    """The response's tensors, in order."""
    ignored: Sequence[str] = ()
    """Names of unknown parameters."""


def parse_infer_request(
    request: InferRequest, layout: TensorLayout, limit: TokenLimit | None = None
) -> ParsedInferRequest:
    """Parse a v2 request to a model of this layout, whose prompt has at most `limit` token ids. Raises
    `InvalidArgument` for an unknown name, a wrong value or a contradiction; `field` names it."""
    tensors = {name: _parameter(tensor) for name, tensor in request.inputs.items() if name not in _PROMPTS}
    tensors.pop(_SAMPLING_PARAMETERS, None)
    replacement = request.inputs.get(_SAMPLING_PARAMETERS)
    ignored = list[str]()
    sampling, options = parse_request_parameters(request.parameters, replacement, tensors, layout.defaults, ignored)
    _check_options(options, layout)
    excluded = options.exclude_input_in_output
    outputs = _outputs(request, options, layout)
    if sampling.logprobs is None and any(output.spec.name in _LOGPROBS for output in outputs):
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    generate = GenerateRequest(
        id=request.id,
        prompt=_prompt(request.inputs, limit),
        sampling=sampling,
        priority=options.priority,
        cache_salt=options.cache_salt,
        cache_hit_threshold=options.cache_hit_threshold,
        timeout=options.timeout / 1e6,
        target_ttft_ms=options.target_ttft_ms,
        target_itl_ms=options.target_itl_ms,
        choice_count=options.n,
        adapter=options.lora_name,
        guided_decoding=options.constraint,
        drafts=options.drafts,
        retention=options.retention,
        echo=(layout.echoes and not options.stream) if excluded is None else not excluded,
    )
    requests = (msgspec.structs.replace(generate, choice=choice) for choice in range(options.n))
    return ParsedInferRequest(tuple(requests), options, outputs, ignored)


def _parameter(tensor: Tensor) -> Any:
    """The value of an input that is a parameter: its element, or a list of them."""
    values = tensor.data.ravel().tolist()
    if tensor.datatype == "BYTES":
        values = [decode_text(tensor.name, value) for value in values]
    return values[0] if len(values) == 1 else values


def _check_options(options: ResponseOptions, layout: TensorLayout) -> None:
    for name, message in layout.refused.items():
        if getattr(options, name):
            raise InvalidArgument(message, field=name)
    if options.stream and options.exclude_input_in_output is False:
        raise InvalidArgument(
            "When streaming, `exclude_input_in_output` = False is not allowed.", field="exclude_input_in_output"
        )


_EMPTY = GenerateChunk(text="", token_ids=(), usage=Usage(0, 0))


class StreamedResponses:
    """Builds the responses of streamed answers, one a chunk. Each has all answers; those without a chunk are empty."""

    def __init__(self, outputs: Sequence[OutputTensor], answers: int = 1) -> None:
        self._outputs = outputs
        self._by_token = any(output.spec.name in _COUNT_TOKENS for output in outputs)
        self.are_text = answers == 1 and [output.spec.name for output in outputs] == [_TEXT]
        """Whether a response has nothing but the text of its chunk."""
        self._sums = [0.0] * answers
        self._empty = [_EMPTY] * answers
        """A chunk without tokens for each answer, with the finish reason of one that has ended."""

    def build_response(self, chunk: GenerateChunk, number: int = 0) -> InferResponse | None:
        """The response of a chunk of answer `number`; None where it has no text yet."""
        if chunk.logprobs:
            self._sums[number] += _sum(chunk)
        if not (chunk.text or chunk.finish_reason is not None or self._by_token):
            return None
        if len(self._sums) == 1:
            return _response([chunk], self._sums, self._outputs)
        self._empty[number] = msgspec.structs.replace(chunk, text="", token_ids=(), logprobs=())
        return _response([*self._empty[:number], chunk, *self._empty[number + 1 :]], self._sums, self._outputs)


async def complete_response(parsed: ParsedInferRequest, streams: Sequence[Chunks]) -> InferResponse:
    answers = await collect_answers(streams)
    return _response(answers, [_sum(answer) for answer in answers], parsed.outputs)


async def collect_answers(streams: Sequence[Chunks]) -> list[GenerateChunk]:
    """Each stream as one chunk. They are read concurrently, and the first error ends all of them."""
    if len(streams) == 1:
        return [await _collect(streams[0])]
    try:
        async with RequestTaskGroup() as group:
            tasks = [group.create_task(_collect(stream)) for stream in streams]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _collect(stream: Chunks) -> GenerateChunk:
    async with aclosing(stream) as chunks:
        return join_chunks([chunk async for chunk in chunks])


def _sum(chunk: GenerateChunk) -> float:
    return sum(token.logprob for token in chunk.logprobs)


def _response(chunks: Sequence[GenerateChunk], sums: Sequence[float], outputs: Sequence[OutputTensor]) -> InferResponse:
    """One response: a chunk of each answer, and the sums of the logprobs of all its tokens so far."""
    tensors = [Tensor.from_values(spec.name, spec.datatype, values(chunks, sums)) for spec, values in outputs]
    return InferResponse(tuple(tensors), final=all(chunk.finish_reason is not None for chunk in chunks))


def _outputs(request: InferRequest, options: ResponseOptions, layout: TensorLayout) -> tuple[OutputTensor, ...]:
    known = {output.spec.name: output for output in layout.outputs}
    if request.outputs is not None:
        return tuple(known[name] for name in request.outputs)
    wanted = {layout.outputs[0].spec.name}
    for option in options.__struct_fields__:
        if option.startswith("return_") and getattr(options, option):
            wanted |= _LOG_PROBS if option == "return_log_probs" else {option.removeprefix("return_")}
    if missing := sorted(wanted - known.keys()):
        parameter, output = f"return_{missing[0]}", missing[0]
        raise InvalidArgument(f"parameter '{parameter}': this model has no output '{output}'", field=parameter)
    return tuple(output for name, output in known.items() if name in wanted)


def _prompt(inputs: Mapping[str, Tensor], limit: TokenLimit | None) -> Prompt:
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise InvalidArgument("give the prompt either as text_input or as input_ids", field="text_input")
    if media := read_media(inputs):
        if "input_ids" in inputs:
            message = f"{media[0].field}: media stand in a text_input, not between input_ids"
            raise InvalidArgument(message, field=media[0].field)
        return TextWithMedia(text_of(inputs["text_input"]), media)
    if "input_ids" in inputs:
        count = inputs["input_ids"].data.size
        if limit is not None and count > max(limit.tokens, _READ_AT_ONCE):
            raise limit.error(f"input_ids are {count}", "input_ids")
        return tuple(inputs["input_ids"].data.ravel().tolist())
    return text_of(inputs["text_input"])


def _padded_logprobs(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[list[float]]:
    width = max(len(chunk.logprobs) for chunk in chunks)
    return [[token.logprob for token in chunk.logprobs] + [0.0] * (width - len(chunk.logprobs)) for chunk in chunks]


def vllm_logprobs(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[bytes]:
    """For each answer a JSON list as Triton's vLLM backend has it: for each token an object by the ids of itself and of
    the likeliest tokens. It is null without logprobs."""
    return [
        orjson.dumps([token.by_id() for token in chunk.logprobs] if chunk.logprobs or not chunk.token_ids else None)
        for chunk in chunks
    ]


def _texts(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[bytes]:
    return [chunk.text.encode() for chunk in chunks]


def _finish_reasons(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[bytes]:
    return [(chunk.finish_reason or "").encode() for chunk in chunks]


def _stop_reasons(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[bytes]:
    return [str(chunk.stop_reason or "").encode() for chunk in chunks]


def _input_counts(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[int]:
    return [max(chunk.usage.prompt_tokens for chunk in chunks)]


def _output_counts(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[int]:
    return [len(chunk.token_ids) for chunk in chunks]


def _output_ids(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def _logprob_sums(_: Sequence[GenerateChunk], sums: Sequence[float]) -> Sequence[float]:
    return sums


# Functions with names: layouts are pickled.
OUTPUT_VALUES: Mapping[str, OutputValues] = {
    "text_output": _texts,
    "finish_reason": _finish_reasons,
    "num_input_tokens": _input_counts,
    "num_output_tokens": _output_counts,
    "output_ids": _output_ids,
    "cum_log_probs": _logprob_sums,
    "output_log_probs": _padded_logprobs,
    "cumulative_logprob": _logprob_sums,
    "stop_reason": _stop_reasons,
    "logprobs": vllm_logprobs,
}
"""What makes an output's elements, by its name; a layout may have others."""

OWN_LAYOUT = TensorLayout(
    inputs=(
        TensorSpec("text_input", "BYTES", (1,), optional=True),
        TensorSpec("input_ids", "INT32", (-1,), optional=True),
        TensorSpec("stream", "BOOL", (1,), optional=True),
        TensorSpec(_SAMPLING_PARAMETERS, "BYTES", (1,), optional=True),
    ),
    outputs=tuple(
        OutputTensor(spec, OUTPUT_VALUES[spec.name])
        for spec in (
            TensorSpec("text_output", "BYTES", (-1,)),
            TensorSpec("finish_reason", "BYTES", (-1,)),
            TensorSpec("num_input_tokens", "INT32", (1,)),
            TensorSpec("num_output_tokens", "INT32", (-1,)),
            TensorSpec("output_ids", "INT32", (-1,)),
            TensorSpec("cum_log_probs", "FP32", (-1,)),
            TensorSpec("output_log_probs", "FP32", (-1, -1)),
            TensorSpec("cumulative_logprob", "FP32", (-1,)),
            TensorSpec("stop_reason", "BYTES", (-1,)),
            TensorSpec("logprobs", "BYTES", (-1,)),
        )
    ),
)
"""The layout of `backend: "charonia"`. A free first dimension is the number of answers, but `output_ids` are
concatenated, and rows of `output_log_probs` are padded with 0."""
