"""A language model behind v2's infer: tensors and parameters become a generation, its chunks become responses.

The names are those of Triton's TensorRT-LLM and vLLM back ends. Knows nothing of engines or tokenizers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, Prompt, join_chunks
from ...core.tensor import Tensor, TensorSpec
from ...tokenization.tokenizer import TokenLimit
from .request_parameters import ResponseOptions, one_element, parse_request_parameters, text_of

INPUTS = (
    TensorSpec("text_input", "BYTES", (1,), optional=True),
    TensorSpec("input_ids", "INT32", (-1,), optional=True),
    TensorSpec("stream", "BOOL", (1,), optional=True),
    TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
)

OUTPUTS = (
    TensorSpec("text_output", "BYTES", (-1,)),
    TensorSpec("finish_reason", "BYTES", (-1,)),
    TensorSpec("num_input_tokens", "INT32", (1,)),
    TensorSpec("num_output_tokens", "INT32", (-1,)),
    TensorSpec("output_ids", "INT32", (-1,)),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
)
"""All but the first come only when asked for: by a parameter `return_...`, or by name. A free first dimension is the
number of answers, but `output_ids` are concatenated, and rows of `output_log_probs` are padded with 0."""

_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_LOGPROBS = {*_LOG_PROBS, "cumulative_logprob"}

_READ_AT_ONCE = 1 << 16
"""Token ids that are converted before they are counted against a shorter limit: so many cost little."""

Chunks = AsyncGenerator[GenerateChunk, None]


class ParsedInferRequest(NamedTuple):
    """A v2 request to a language model, parsed: one generation or several for the same prompt. `outputs`: the names of
    the response's tensors, in order."""

    requests: tuple[GenerateRequest, ...]
    options: ResponseOptions
    outputs: tuple[str, ...]


def parse_infer_request(request: InferRequest, limit: TokenLimit | None = None) -> ParsedInferRequest:
    """Parse a v2 request. `limit`: of its token ids.

    Raises:
        InvalidArgument: a name is unknown, a value is wrong, or they contradict each other; `field` names it.
    """
    sampling, options = parse_request_parameters(request.parameters, request.inputs.get("sampling_parameters"))
    options = _response_options(request, options)
    outputs = _output_names(request, options)
    if _LOGPROBS & set(outputs):
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    generate = GenerateRequest(
        id=request.id,
        prompt=_prompt(request.inputs, limit),
        sampling=sampling,
        priority=options.priority,
        cache_salt=options.cache_salt,
        timeout=options.timeout / 1e6,
        choice_count=options.n,
        adapter=options.lora_name,
        guided_decoding=options.guide,
        echo=not options.exclude_input_in_output,
    )
    requests = (msgspec.structs.replace(generate, choice=choice) for choice in range(options.n))
    return ParsedInferRequest(tuple(requests), options, outputs)


def _response_options(request: InferRequest, options: ResponseOptions) -> ResponseOptions:
    """`options` with the `stream` that came as a tensor, which wins."""
    if "stream" in request.inputs:
        options = msgspec.structs.replace(options, stream=bool(one_element(request.inputs["stream"])))
    if options.stream and not options.exclude_input_in_output:
        raise InvalidArgument(
            "When streaming, `exclude_input_in_output` = False is not allowed.", field="exclude_input_in_output"
        )
    if options.stream and options.n > 1:
        raise InvalidArgument(f"When streaming, n must be 1, got {options.n}.", field="n")
    return options


class StreamedResponses:
    """The responses of one streamed answer, chunk by chunk."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs = outputs
        self._by_token = not _COUNT_TOKENS.isdisjoint(outputs)
        self._sum = 0.0

    def build_response(self, chunk: GenerateChunk) -> InferResponse | None:
        """The response of a chunk; None where there is nothing to show yet."""
        if chunk.logprobs:
            self._sum += _sum(chunk)
        if chunk.text or chunk.finish_reason is not None or self._by_token:
            return _response([chunk], [self._sum], self._outputs)
        return None


_COUNT_TOKENS = {"output_ids", "output_log_probs", "num_output_tokens"}
"""Outputs that would lose tokens if a response without text were left out."""


async def complete_response(asked: ParsedInferRequest, streams: Sequence[Chunks]) -> InferResponse:
    """The one response of the whole streams of all its requests."""
    wholes = await collect_answers(streams)
    return _response(wholes, [_sum(whole) for whole in wholes], asked.outputs)


async def collect_answers(streams: Sequence[Chunks]) -> list[GenerateChunk]:
    """Each stream as one chunk. They are read side by side, and the first error ends all of them."""
    if len(streams) == 1:
        return [await _collect(streams[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_collect(stream)) for stream in streams]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _collect(stream: Chunks) -> GenerateChunk:
    async with aclosing(stream) as chunks:
        return join_chunks([chunk async for chunk in chunks])


def _sum(chunk: GenerateChunk) -> float:
    return sum(each.logprob for each in chunk.logprobs)


def _response(chunks: Sequence[GenerateChunk], sums: Sequence[float], outputs: Sequence[str]) -> InferResponse:
    """One response: a chunk of each answer, and the sums of the logprobs of all its tokens so far."""
    values = ((name, _VALUES[name](chunks, sums)) for name in outputs)
    tensors = tuple([Tensor.from_values(name, _DATATYPES[name], each) for name, each in values])
    return InferResponse(tensors, final=chunks[0].finish_reason is not None)


def _padded_logprobs(chunks: Sequence[GenerateChunk]) -> list[list[float]]:
    width = max(len(chunk.logprobs) for chunk in chunks)
    return [[each.logprob for each in chunk.logprobs] + [0.0] * (width - len(chunk.logprobs)) for chunk in chunks]


_DATATYPES = {spec.name: spec.datatype for spec in OUTPUTS}

_VALUES: dict[str, Callable[[Sequence[GenerateChunk], Sequence[float]], Any]] = {
    "text_output": lambda chunks, _: [chunk.text.encode() for chunk in chunks],
    "finish_reason": lambda chunks, _: [(chunk.finish_reason or "").encode() for chunk in chunks],
    "num_input_tokens": lambda chunks, _: [chunks[0].usage.prompt_tokens],
    "num_output_tokens": lambda chunks, _: [len(chunk.token_ids) for chunk in chunks],
    "output_ids": lambda chunks, _: [token for chunk in chunks for token in chunk.token_ids],
    "cum_log_probs": lambda _, sums: sums,
    "output_log_probs": lambda chunks, _: _padded_logprobs(chunks),
    "cumulative_logprob": lambda _, sums: sums,
}


def _output_names(request: InferRequest, options: ResponseOptions) -> tuple[str, ...]:
    if request.outputs is not None:
        return request.outputs
    asked = (name for name in _DATATYPES if getattr(options, f"return_{name}", False))
    return ("text_output", *asked, *(_LOG_PROBS if options.return_log_probs else ()))


def _prompt(inputs: Mapping[str, Tensor], limit: TokenLimit | None) -> Prompt:
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise InvalidArgument("give the prompt either as text_input or as input_ids", field="text_input")
    if "input_ids" in inputs:
        count = inputs["input_ids"].data.size
        if limit is not None and count > max(limit.tokens, _READ_AT_ONCE):
            raise limit.error(f"input_ids are {count}", "input_ids")
        return tuple(inputs["input_ids"].data.ravel().tolist())
    return text_of(inputs["text_input"])
