"""The v2 face of a language model: tensors and parameters become a generation, its chunks become responses.

Names are those that Triton's TensorRT-LLM and vLLM back ends made known. Knows nothing of engines or tokenizers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import (
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    Prompt,
    SamplingParams,
    join_chunks,
)
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
"""All but the first come when asked for: by a parameter `return_...`, or by name. A free first dimension counts the
answers, but `output_ids` stand one after the other and rows of `output_log_probs` are filled up with 0."""

_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_LOGPROBS = {*_LOG_PROBS, "cumulative_logprob"}

_READ_AT_ONCE = 1 << 16
"""Token ids that cost little to read before they are too many."""

Chunks = AsyncGenerator[GenerateChunk, None]


class ParsedInferRequest(NamedTuple):
    """What a v2 request asks of a language model: one answer or several to the same prompt. `outputs`: the names to
    answer with, in order."""

    requests: tuple[GenerateRequest, ...]
    options: ResponseOptions
    outputs: tuple[str, ...]


def parse_infer_request(request: InferRequest, limit: TokenLimit | None = None) -> ParsedInferRequest:
    """Understand a v2 request. `limit`: how many token ids it may have.

    Raises:
        InvalidArgument: a name is unknown, a value is wrong, or they contradict each other; `field` names it.
    """
    settings = parse_request_parameters(request.parameters, request.inputs.get("sampling_parameters"))
    manner = _manner(request, settings.options)
    outputs = _output_names(request, manner)
    generate = GenerateRequest(
        id=request.id,
        prompt=_prompt(request.inputs, limit),
        sampling=_with_logprobs(settings.sampling, outputs),
        priority=manner.priority,
        cache_salt=manner.cache_salt,
        timeout=manner.timeout / 1e6,
        choice_count=manner.n,
        adapter=manner.lora_name,
        guided_decoding=manner.guide,
        echo=not manner.exclude_input_in_output,
    )
    requests = (msgspec.structs.replace(generate, choice=choice) for choice in range(manner.n))
    return ParsedInferRequest(tuple(requests), manner, outputs)


def _manner(request: InferRequest, manner: ResponseOptions) -> ResponseOptions:
    """With the `stream` that came as a tensor, which wins."""
    if "stream" in request.inputs:
        manner = msgspec.structs.replace(manner, stream=bool(one_element(request.inputs["stream"])))
    if manner.stream and not manner.exclude_input_in_output:
        raise InvalidArgument(
            "When streaming, `exclude_input_in_output` = False is not allowed.", field="exclude_input_in_output"
        )
    if manner.stream and manner.n > 1:
        raise InvalidArgument(f"When streaming, n must be 1, got {manner.n}.", field="n")
    return manner


def _with_logprobs(sampling: SamplingParams, outputs: Sequence[str]) -> SamplingParams:
    return msgspec.structs.replace(sampling, logprobs=0) if _LOGPROBS & set(outputs) else sampling


class StreamedResponses:
    """The responses of one streamed answer, chunk by chunk."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs = outputs
        self._by_token = not _COUNT_TOKENS.isdisjoint(outputs)
        self._sum = 0.0

    def build_response(self, chunk: GenerateChunk) -> InferResponse | None:
        """None where there is nothing to show yet."""
        if chunk.logprobs:
            self._sum += _sum(chunk)
        if chunk.text or chunk.finish_reason is not None or self._by_token:
            return _response(_ResponseContent([chunk], [self._sum]), self._outputs)
        return None


_COUNT_TOKENS = {"output_ids", "output_log_probs", "num_output_tokens"}
"""Outputs that would lose tokens if a response without text were left out."""


async def complete_response(question: ParsedInferRequest, streams: Sequence[Chunks]) -> InferResponse:
    """The one response that says what the chunks of all the question's requests say."""
    wholes = await _collect_all(streams)
    return _response(_ResponseContent(wholes, [_sum(whole) for whole in wholes]), question.outputs)


async def _collect_all(streams: Sequence[Chunks]) -> list[GenerateChunk]:
    """What each stream says, read side by side; the first error ends all of them."""
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


class _ResponseContent(NamedTuple):
    """What is said in one response, by one answer or several. `sums`: the logprobs of all their tokens so far."""

    chunks: Sequence[GenerateChunk]
    sums: Sequence[float]


def _response(answers: _ResponseContent, outputs: Sequence[str]) -> InferResponse:
    tensors = tuple([Tensor.from_values(name, _DATATYPES[name], _VALUES[name](answers)) for name in outputs])
    return InferResponse(tensors, final=answers.chunks[0].finish_reason is not None)


def _padded(rows: Sequence[list[float]]) -> list[list[float]]:
    width = max(map(len, rows))
    return [row + [0.0] * (width - len(row)) for row in rows]


_DATATYPES = {spec.name: spec.datatype for spec in OUTPUTS}

_VALUES: dict[str, Callable[[_ResponseContent], Any]] = {
    "text_output": lambda said: [chunk.text.encode() for chunk in said.chunks],
    "finish_reason": lambda said: [(chunk.finish_reason or "").encode() for chunk in said.chunks],
    "num_input_tokens": lambda said: [said.chunks[0].usage.prompt_tokens],
    "num_output_tokens": lambda said: [len(chunk.token_ids) for chunk in said.chunks],
    "output_ids": lambda said: [token for chunk in said.chunks for token in chunk.token_ids],
    "cum_log_probs": lambda said: said.sums,
    "output_log_probs": lambda said: _padded([[each.logprob for each in chunk.logprobs] for chunk in said.chunks]),
    "cumulative_logprob": lambda said: said.sums,
}


def _output_names(request: InferRequest, manner: ResponseOptions) -> tuple[str, ...]:
    if request.outputs is not None:
        return request.outputs
    asked = (name for name in _DATATYPES if getattr(manner, f"return_{name}", False))
    return ("text_output", *asked, *(_LOG_PROBS if manner.return_log_probs else ()))


def _prompt(inputs: Mapping[str, Tensor], limit: TokenLimit | None) -> Prompt:
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise InvalidArgument("give the prompt either as text_input or as input_ids", field="text_input")
    if "input_ids" in inputs:
        count = inputs["input_ids"].data.size
        if limit is not None and count > max(limit.tokens, _READ_AT_ONCE):
            raise limit.error(f"input_ids are {count}", "input_ids")
        return tuple(inputs["input_ids"].data.ravel().tolist())
    return text_of(inputs["text_input"])
