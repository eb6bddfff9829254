"""The model `tensorrt_llm` of a Triton repository behind v2's infer. Knows nothing of engines, tokenizers and texts."""

from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from ...core.errors import InvalidArgument
from ...core.model import ModelConfig
from ...core.request import InferRequest, InferResponse
from ...core.request_context import RequestContext
from ...core.tasks import merge_streams
from ...core.tensor import TensorSpec
from ...tokenization.tokenizer import TokenLimit
from ..frontend.infer import GeneratingModel, collect_answers
from .cancellation import cancel_request, wants_cancellation
from .token_answers import RETURNED_OUTPUTS, TokenAnswer, TokenReader, output_tensor
from .token_fields import FIELDS, OUTPUTS, FieldUse, find_field
from .token_request import TokenQuestion, parse_token_request

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
        inputs = {name: field.spec for name, field in FIELDS.items()} | {each.name: each for each in config.inputs}
        outputs = OUTPUTS | {each.name: each for each in config.outputs}
        tensors = tuple(inputs.values()), tuple(outputs.values())
        return cls(*tensors, config.max_batch_size, config.decoupled, excludes_input)

    async def infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> AsyncGenerator[InferResponse, None]:
        if wants_cancellation(request):
            yield cancel_request(request, model)
            return
        question = parse_token_request(request, self.max_batch_size > 0, TokenLimit(model.info.max_model_len))
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
        asked, first = question.requests, len(context.sequences)
        readers: dict[int, TokenReader] = {}
        always, open_answers = "return_perf_metrics" in question.flags, len(asked)
        async with aclosing(merge_streams([model.generate(each, context) for each in asked])) as merged:
            async for number, chunk in merged:
                empty, ended = always or number not in readers, chunk.finish_reason is not None
                if number not in readers:
                    record, place = context.sequences[first + number], divmod(number, len(question.rows[0]))
                    readers[number] = TokenReader(record, model.info.block_size, *place)
                answer = readers[number].read(chunk)
                open_answers -= ended
                if answer.tokens or (ended and empty):
                    yield self._response(outputs, [[answer]], not open_answers)

    async def _answer_whole(
        self, question: TokenQuestion, outputs: Sequence[TensorSpec], context: RequestContext, model: GeneratingModel
    ) -> InferResponse:
        excluded = self.excludes_input if question.excluded is None else question.excluded
        asked, first = question.requests, len(context.sequences)
        wholes = await collect_answers([model.generate(each, context) for each in asked])
        answers, count = [], len(question.rows[0])
        for number, (each, whole) in enumerate(zip(asked, wholes, strict=True)):
            record, place = context.sequences[first + number], divmod(number, count)
            reader = TokenReader(record, model.info.block_size, *place)
            answers.append(reader.read(whole, () if excluded else cast(tuple[int, ...], each.prompt)))
        return self._response(outputs, [answers[at : at + count] for at in range(0, len(answers), count)])

    def _wanted(self, request: InferRequest, flags: Set[str]) -> Sequence[TensorSpec]:
        """The outputs to make: those that the request names, or the tokens and what its flags ask for."""
        names = set(request.outputs or ("output_ids", "sequence_length"))
        if request.outputs is None:
            names |= {name for flag, each in RETURNED_OUTPUTS.items() if flag in flags for name in each}
        return [spec for spec in self.output_specs if spec.name in names]

    def _response(
        self, outputs: Sequence[TensorSpec], rows: Sequence[Sequence[TokenAnswer]], final: bool = True
    ) -> InferResponse:
        batched = self.max_batch_size > 0
        return InferResponse(tuple([output_tensor(spec, rows, batched) for spec in outputs]), final=final)


def _check_type(config: ModelConfig, side: str, given: TensorSpec, datatype: str) -> None:
    if given.datatype != datatype:
        message = f"{side} '{given.name}' of model '{config.name}' must be {datatype}, not {given.datatype}"
        raise InvalidArgument(message, field=f"{side}.{given.name}.data_type")
