"""The model `tensorrt_llm` of a Triton repository behind v2's infer. Knows nothing of engines, tokenizers and texts."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...core.model import ModelConfig
from ...core.request import GenerateChunk, InferRequest, InferResponse
from ...core.request_context import RequestContext, SequenceRecord
from ...core.sampling import TokenLimit
from ...core.tasks import merge_streams
from ...core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from ...engine.client.infer import GeneratingModel, collect_answers
from .cancellation import cancel_request, wants_cancellation
from .token_fields import FIELDS, OUTPUTS, FieldUse, find_field
from .token_request import TokenQuestion, parse_token_request


class TokenAnswer(NamedTuple):
    """A part of an answer, or all of it. `tokens`: those that are shown; `log_probs`: of the generated ones among them;
    `log_prob`: the sum of all so far. `row`: of the batch; `sequence`: which of the row's
    answers. `block_size`: of the cache."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    log_prob: float
    chunk: GenerateChunk
    record: SequenceRecord
    block_size: int
    row: int = 0
    sequence: int = 0

    @property
    def blocks(self) -> int:
        """The blocks of the cache that its tokens fill."""
        usage = self.chunk.usage
        return -(-(usage.prompt_tokens + usage.completion_tokens) // self.block_size)

    @property
    def reused_blocks(self) -> int:
        return self.chunk.usage.cached_tokens // self.block_size


class TokenReader:
    """Takes the chunks of one generation. The token by which the model ended it is not shown; stop words are."""

    def __init__(self, record: SequenceRecord, block_size: int, row: int = 0, sequence: int = 0) -> None:
        self._of = record, block_size, row, sequence
        self._log_prob = 0.0

    def read(self, chunk: GenerateChunk, prompt: tuple[int, ...] = ()) -> TokenAnswer:
        """The part of the answer that is in a chunk; `prompt` is shown before it."""
        tokens = chunk.token_ids[:-1] if chunk.end_token else chunk.token_ids
        log_probs = [likely.logprob for likely in chunk.logprobs[: len(tokens)]] or [0.0] * len(tokens)
        self._log_prob += sum(log_probs)
        return TokenAnswer(prompt + tokens, log_probs, self._log_prob, chunk, *self._of)


def _time(seconds: float | None) -> list[int]:
    return [int((seconds or 0.0) * 1e9)]


_ALWAYS_ZERO = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
_ZEROS = {*_ALWAYS_ZERO, "context_logits", "generation_logits", "context_phase_params"}
_VALUES: Mapping[str, Callable[[Sequence[TokenAnswer]], Sequence[Any]]] = {
    "output_ids": lambda row: [answer.tokens for answer in row],
    "sequence_length": lambda row: [len(answer.tokens) for answer in row],
    "cum_log_probs": lambda row: [answer.log_prob for answer in row],
    "output_log_probs": lambda row: [answer.log_probs for answer in row],
    "context_logits": lambda _: [[0.0]],
    "generation_logits": lambda _: [[[0.0]]],
    "batch_index": lambda row: [row[0].row],
    "sequence_index": lambda row: [row[0].sequence],
    "context_phase_params": lambda _: [],
    "num_input_tokens": lambda row: [row[0].chunk.usage.prompt_tokens],
    "num_output_tokens": lambda row: [sum(len(answer.log_probs) for answer in row)],
    "kv_cache_alloc_total_blocks": lambda row: [row[0].blocks],
    "kv_cache_reused_blocks": lambda row: [row[0].reused_blocks],
    "kv_cache_alloc_new_blocks": lambda row: [row[0].blocks - row[0].reused_blocks],
    "arrival_time_ns": lambda row: _time(row[0].record.opened),
    "first_scheduled_time_ns": lambda row: _time(row[0].record.begun),
    "first_token_time_ns": lambda row: _time(row[0].record.first),
    "last_token_time_ns": lambda row: _time(row[0].record.last),
    **dict.fromkeys(_ALWAYS_ZERO, lambda _: [0]),
}
"""The elements of an output for one row of the batch, from its answers. Times are of the server's monotonic clock."""

_MEASURED = frozenset(name for name in OUTPUTS if name.startswith(("kv_cache", "acceptance", "total_")))
_MEASURED |= {name for name in OUTPUTS if name.endswith("_time_ns")}
RETURNED_OUTPUTS: Mapping[str, Collection[str]] = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_perf_metrics": _MEASURED,
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
}
"""The outputs that an input asks for, where a request names none."""


def output_tensor(spec: TensorSpec, rows: Sequence[Sequence[TokenAnswer]], batched: bool) -> Tensor:
    """One output for all rows of a batch; without a batch dimension for the only row."""
    if spec.name in _ZEROS and len(rows) == 1:
        return _zeros(spec, batched)
    return _make_tensor(spec, [_VALUES[spec.name](row) for row in rows], batched)


@cache
def _zeros(spec: TensorSpec, batched: bool) -> Tensor:
    """Ensembles ask for all outputs with every token: those that are always the same are made once."""
    tensor = _make_tensor(spec, [_VALUES[spec.name](())], batched)
    tensor.data.flags.writeable = False
    return tensor


def _make_tensor(spec: TensorSpec, rows: Sequence[Any], batched: bool) -> Tensor:
    data = _stacked(rows, spec)
    data = data if batched else data[0]
    return Tensor(spec.name, spec.datatype, data.shape, data)


def _stacked(rows: Sequence[Any], spec: TensorSpec) -> NDArray[Any]:
    """The elements of all rows, the last dimension padded with 0 to the longest."""
    dtype = NUMPY_TYPES[spec.datatype]
    if not (rows[0] and isinstance(rows[0][0], list | tuple)):
        return np.array(rows, dtype)
    width = max(len(element) for row in rows for element in row)
    return np.array([[[*element, *[0] * (width - len(element))] for element in row] for row in rows], dtype)


NOT_DECOUPLED = "Streaming is only supported if model is deployed using decoupled mode."


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The tensors of one such model. `excludes_input`: unless a request says otherwise, whole answers begin without the
    prompt. With a `max_batch_size`, each tensor has the batch as its first dimension."""

    inputs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    decoupled: bool = False
    excludes_input: bool = False
    implied_stream: bool = False

    @classmethod
    def of_config(cls, config: ModelConfig, excludes_input: bool = False) -> "TokenLayout":
        """The layout of a config, with the tensors that it leaves out.

        Raises:
            InvalidArgument: a tensor has another type than in Triton's, or is an output that is not made here.
        """
        for spec in config.inputs:
            field = find_field(spec.name)
            if field is not None and field.use is FieldUse.ON:
                _check_type(config, "input", spec, field.spec.datatype)
        for spec in config.outputs:
            if spec.name not in OUTPUTS:
                message = f"model '{config.name}' has no output '{spec.name}'; it has {', '.join(OUTPUTS)}"
                raise InvalidArgument(message, field=f"output.{spec.name}")
            if not spec.name.endswith("_logits"):  # the type of those is the model's
                _check_type(config, "output", spec, OUTPUTS[spec.name].datatype)
        inputs = {name: field.spec for name, field in FIELDS.items()} | {spec.name: spec for spec in config.inputs}
        outputs = OUTPUTS | {spec.name: spec for spec in config.outputs}
        tensors = tuple(inputs.values()), tuple(outputs.values())
        return cls(*tensors, config.max_batch_size, config.decoupled, excludes_input)

    async def infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> AsyncGenerator[InferResponse, None]:
        if wants_cancellation(request):
            yield cancel_request(request, model)
            return
        question = parse_token_request(request, self.max_batch_size > 0, TokenLimit(model.info.max_model_len))
        if question.ignored:
            context.warn(f"ignored: {', '.join(question.ignored)}")
        outputs = self._wanted(request, question.flags)
        if not question.streaming:
            yield await self._answer_whole(question, outputs, context, model)
            return
        if not self.decoupled:
            raise InvalidArgument(NOT_DECOUPLED, field="streaming")
        async with aclosing(self._stream(question, outputs, context, model)) as responses:
            async for response in responses:
                yield response

    async def _stream(
        self, question: TokenQuestion, outputs: Sequence[TensorSpec], context: RequestContext, model: GeneratingModel
    ) -> AsyncGenerator[InferResponse, None]:
        """Each response has tokens of one answer."""
        requests = question.requests
        first = len(context.sequences)
        readers: dict[int, TokenReader] = {}
        always = "return_perf_metrics" in question.flags
        open_answers = len(requests)
        async with aclosing(merge_streams([model.generate(request, context) for request in requests])) as merged:
            async for number, chunk in merged:
                empty = always or number not in readers
                ended = chunk.finish_reason is not None
                if number not in readers:
                    record = context.sequences[first + number]
                    place = divmod(number, len(question.rows[0]))
                    readers[number] = TokenReader(record, model.info.block_size, *place)
                answer = readers[number].read(chunk)
                open_answers -= ended
                if answer.tokens or (ended and empty):
                    yield self._response(outputs, [[answer]], not open_answers)

    async def _answer_whole(
        self, question: TokenQuestion, outputs: Sequence[TensorSpec], context: RequestContext, model: GeneratingModel
    ) -> InferResponse:
        excluded = self.excludes_input if question.excluded is None else question.excluded
        requests = question.requests
        first = len(context.sequences)
        chunks = await collect_answers([model.generate(request, context) for request in requests])
        answers = []
        count = len(question.rows[0])
        for number, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
            record = context.sequences[first + number]
            place = divmod(number, count)
            reader = TokenReader(record, model.info.block_size, *place)
            answers.append(reader.read(chunk, () if excluded else cast(tuple[int, ...], request.prompt)))
        return self._response(outputs, [answers[at : at + count] for at in range(0, len(answers), count)])

    def _wanted(self, request: InferRequest, flags: Set[str]) -> Sequence[TensorSpec]:
        """The outputs to make: those that the request names, or the tokens and what its flags ask for."""
        names = set(request.outputs or ("output_ids", "sequence_length"))
        if request.outputs is None:
            names |= {name for flag, outputs in RETURNED_OUTPUTS.items() if flag in flags for name in outputs}
        return [spec for spec in self.output_specs if spec.name in names]

    def _response(
        self, outputs: Sequence[TensorSpec], rows: Sequence[Sequence[TokenAnswer]], final: bool = True
    ) -> InferResponse:
        batched = self.max_batch_size > 0
        return InferResponse(tuple([output_tensor(spec, rows, batched) for spec in outputs]), final=final)


def _check_type(config: ModelConfig, side: str, spec: TensorSpec, datatype: str) -> None:
    if spec.datatype != datatype:
        message = f"{side} '{spec.name}' of model '{config.name}' must be {datatype}, not {spec.datatype}"
        raise InvalidArgument(message, field=f"{side}.{spec.name}.data_type")
