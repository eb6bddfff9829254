"""Requests to models with the tensors of an encoder: texts, pairs of texts or token ids become vectors or scores.

Any model with these tensors serves them, an ensemble too. Knows no protocol.
"""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from ...core.errors import CharoniaError, Internal, InvalidArgument
from ...core.gateway import ModelHandle, ModelLookup
from ...core.request import InferRequest
from ...core.tasks import RequestTaskGroup
from ...core.tensor import Tensor
from ..http.request_context import context_of
from .json_body import field_error, model_field

MAX_INPUTS = 2048
"""Texts of one request; OpenAI's limit."""

TEXT, PAIR, IDS = "text_input", "text_pair", "input_ids"
EMBEDDING, SCORE, COUNT = "embedding", "score", "num_input_tokens"
_PADDING = -1
"""Fills the rows of token ids that are shorter than the longest."""


async def acquire_encoder(lookup: ModelLookup, request: Request, name: str | None) -> ModelHandle:
    """The model of a request, which need not name the only one that makes vectors or scores."""
    if not name:
        encoders = [each.name for each in lookup.model_configs() if {EMBEDDING, SCORE} & {o.name for o in each.outputs}]
        if len(encoders) != 1:
            raise field_error("model", "must be given: this server has several encoders, or none")
        name = encoders[0]
    with model_field():
        return await lookup.acquire(context_of(request.scope), name)


def makes(model: ModelHandle, output: str) -> bool:
    """Whether the model has this output."""
    return any(spec.name == output for spec in model.config.outputs)


def check_encoder(model: ModelHandle, output: str, what: str, inputs: Sequence[str]) -> None:
    """Raises `InvalidArgument` unless the model takes the `inputs` and makes the output, which is `what`."""
    taken = {spec.name for spec in model.config.inputs}
    if not makes(model, output) or not taken.issuperset(inputs):
        raise field_error(
            "model", f"'{model.config.name}' makes no {what}: it lacks {', '.join(inputs)} or the output {output}"
        )


def check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise field_error(name, f"must be 1 to {MAX_INPUTS}, got {count}")


def several_inputs(given: Any) -> list[Any]:
    """The texts of a body's `input`, or its lists of token ids. Raises `InvalidArgument`."""
    several = [given] if isinstance(given, str) or is_ids(given) else given
    if isinstance(several, list) and several:
        check_count("input", len(several))
        if all(isinstance(each, str) and each for each in several) or all(map(is_ids, several)):
            return several
    message = "input must be a string, a list of strings, a list of token ids or a list of such lists"
    raise InvalidArgument(f"{message}, none of them empty", field="input")


def is_ids(given: Any) -> bool:
    ids = isinstance(given, list) and set(map(type, given)) == {int}
    return ids and min(given) >= 0 and max(given) < 2**31


def input_tensors(model: ModelHandle, items: Sequence[Any]) -> tuple[str, list[dict[str, Tensor]]]:
    """The name of the input that `items`, texts or lists of token ids, are for, and the tensors of their batches."""
    name, tensor = (IDS, ids_tensor) if isinstance(items[0], list) else (TEXT, text_tensor)
    return name, [{name: tensor(name, part)} for part in batches(items, model)]


def pair_tensors(model: ModelHandle, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """The tensors of the batches of pairs of texts."""
    return [
        {TEXT: text_tensor(TEXT, [one for one, _ in part]), PAIR: text_tensor(PAIR, [other for _, other in part])}
        for part in batches(pairs, model)
    ]


async def encode(
    model: ModelHandle, inputs: Sequence[dict[str, Tensor]], output: str
) -> tuple[NDArray[np.float32], int]:
    """A row of values for each text of all batches, and how many tokens the texts were in all.

    The batches run at the same time; the first error ends the others.
    """
    wanted = (output, COUNT) if any(spec.name == COUNT for spec in model.config.outputs) else (output,)
    requests = [InferRequest(inputs=each, outputs=wanted) for each in inputs]
    try:
        async with RequestTaskGroup() as group:
            tasks = [group.create_task(_encode_batch(model, request)) for request in requests]
    except* CharoniaError as errors:
        raise _first(errors) from None
    outputs = [task.result() for task in tasks]
    values = np.concatenate([np.atleast_2d(each[output].data.reshape(each[output].shape)) for each in outputs])
    return values, sum(int(each[COUNT].data.sum()) for each in outputs if COUNT in each)


async def _encode_batch(model: ModelHandle, request: InferRequest) -> dict[str, Tensor]:
    async with aclosing(model.infer(request)) as responses:
        async for response in responses:
            if response.outputs:
                return {tensor.name: tensor for tensor in response.outputs}
    raise Internal(f"model '{model.config.name}' made nothing")


def _first(errors: BaseExceptionGroup[CharoniaError]) -> CharoniaError:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def batches(items: Sequence[Any], model: ModelHandle) -> list[Sequence[Any]]:
    size = max(model.config.max_batch_size, 1)
    return [items[start : start + size] for start in range(0, len(items), size)]


def text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    try:
        data = np.array([[text.encode()] for text in texts], object)
    except UnicodeEncodeError:  # lone surrogates
        raise InvalidArgument("a text is not valid Unicode", field="input") from None
    return Tensor(name, "BYTES", data.shape, data)


def ids_tensor(name: str, rows: Sequence[Sequence[int]]) -> Tensor:
    data = np.full((len(rows), max(map(len, rows))), _PADDING, np.int64)
    for row, ids in zip(data, rows, strict=True):
        row[: len(ids)] = ids
    return Tensor(name, "INT64", data.shape, data)


def usage_of(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
