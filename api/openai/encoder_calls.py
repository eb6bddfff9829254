"""Requests to models with the tensors of an encoder: texts, pairs of texts or token ids become vectors or scores.

Any model with these tensors serves them, an ensemble too. Knows no protocol.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from ...core.encoder_tensors import (
    COUNT,
    DOCUMENT,
    EMBEDDING,
    FINAL_SCORES,
    IDS,
    INSTRUCTION,
    NO_TOKEN,
    PAIR,
    PROMPT,
    QUERY,
    SCORE,
    TEXT,
    TOKEN_EMBEDDING,
    TOKEN_EMBEDDING_COUNT,
    TOKEN_IDS,
    TOKEN_WEIGHT,
)
from ...core.errors import CharoniaError, Internal, InvalidArgument
from ...core.gateway import ModelHandle, ModelLookup
from ...core.model import ModelConfig
from ...core.request import InferRequest
from ...core.tasks import RequestTaskGroup
from ...core.tensor import Tensor
from ..http.connection import offload_if_large
from ..http.request_context import context_of
from .json_body import field_error, model_field

MAX_INPUTS = 2048
"""Texts of one request; OpenAI's limit."""


async def acquire_encoder(lookup: ModelLookup, request: Request, name: str | None) -> ModelHandle:
    """The model of a request, which need not name the only one that makes vectors or scores."""
    if not name:
        encoders = [
            config.name for config in lookup.model_configs() if makes(config, EMBEDDING, SCORE, TOKEN_EMBEDDING)
        ]
        if len(encoders) != 1:
            raise field_error("model", "must be given: this server has several encoders, or none")
        name = encoders[0]
    with model_field():
        return await lookup.acquire(context_of(request.scope), name)


def makes(config: ModelConfig, *outputs: str) -> bool:
    """Whether a model has one of these outputs."""
    return any(spec.name in outputs for spec in config.outputs)


def check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise field_error(name, f"must be 1 to {MAX_INPUTS}, got {count}")


def several_inputs(value: Any) -> list[Any]:
    """The texts of a body's `input`, or its lists of token ids. Raises `InvalidArgument`."""
    inputs = [value] if isinstance(value, str) or is_ids(value) else value
    if isinstance(inputs, list) and inputs:
        check_count("input", len(inputs))
        if all(isinstance(text, str) and text for text in inputs) or all(map(is_ids, inputs)):
            return inputs
    problem = "must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
    raise field_error("input", problem)


def is_ids(value: Any) -> bool:
    """Whether a value is a list of token ids that is not empty."""
    ids = isinstance(value, list) and set(map(type, value)) == {int}
    return ids and min(value) >= 0 and max(value) < 2**31


async def encode_inputs(
    model: ModelHandle, inputs: Sequence[Any], output: str, what: str, prompt_name: str | None = None
) -> tuple[NDArray[np.float32], int]:
    """The model's `output`, a row for each of `inputs` (texts, or lists of token ids), and how many tokens they were.
    `prompt_name`: of the prompt in the model's files that is put before each text.

    Raises `InvalidArgument` for a model that makes none: `what` it makes none of; or for one without prompts.
    """
    batches = _input_batches(model, inputs, output, what, prompt_name)
    return await _encode(model, batches, output)


async def encode_tokens(
    model: ModelHandle, inputs: Sequence[Any], output: str, what: str, prompt_name: str | None = None
) -> tuple[list[NDArray[np.float32]], int]:
    """As `encode_inputs`, of an output with a row for each token: `TOKEN_EMBEDDING` or `TOKEN_WEIGHT`."""
    batches = _input_batches(model, inputs, output, what, prompt_name)
    lengths = TOKEN_EMBEDDING_COUNT if output == TOKEN_EMBEDDING else TOKEN_IDS
    results, tokens = await _run(model, batches, (output, lengths))
    arrays = []
    for tensors in results:
        marks = tensors[lengths].data.reshape(tensors[lengths].shape)
        counts = marks[:, 0] if output == TOKEN_EMBEDDING else (marks != NO_TOKEN).sum(axis=1)
        rows = tensors[output].data.reshape(tensors[output].shape)
        arrays += [row[:count] for row, count in zip(rows, counts, strict=True)]
    return arrays, tokens


TASKS = {"embed": EMBEDDING, "classify": SCORE, "token_embed": TOKEN_EMBEDDING, "token_classify": TOKEN_WEIGHT}
"""The outputs of vLLM's pooling tasks."""


def choose_task(config: ModelConfig, wanted: str | None, field: str = "task") -> str:
    """The pooling task that is wanted, or of None the first that the model does. Raises `InvalidArgument` of that
    field for one that it does not."""
    known = [task for task, output in TASKS.items() if makes(config, output)]
    task = wanted or next(iter(known), "embed")
    if task not in known:
        does = ", ".join(known) or "none"
        raise field_error(field, f": model '{config.name}' does {does}, not {task[:40]}")
    return task


async def pool_inputs(
    model: ModelHandle, inputs: Sequence[Any], task: str, prompt_name: str | None = None
) -> tuple[list[NDArray[np.float32]], int]:
    """What the model makes of each input, and how many tokens they were; that of a task by tokens has a row for each of
    them. `prompt_name`: as of `encode_inputs`."""
    output = TASKS[task]
    if output == EMBEDDING:
        values, tokens = await encode_inputs(model, inputs, output, "vectors", prompt_name)
        return list(values), tokens
    if output == SCORE:
        values, tokens = await classify_inputs(model, inputs, prompt_name)
        return list(values), tokens
    arrays, tokens = await encode_tokens(model, inputs, output, "vectors of tokens", prompt_name)
    return [array if array.ndim == 2 else array[:, None] for array in arrays], tokens


async def late_interaction(model: ModelHandle, pairs: Sequence[tuple[str, str]]) -> tuple[NDArray[np.float32], int]:
    """The MaxSim of each query with its document, and how many tokens they were: the sum, over the query's vectors, of
    the largest product with one of the document's. Each text is encoded once. Source: https://arxiv.org/abs/2004.12832.
    """
    vectors: list[dict[str, NDArray[np.float32]]] = []
    tokens = 0
    for side, role in enumerate((QUERY, DOCUMENT)):
        texts = list(dict.fromkeys(pair[side] for pair in pairs))
        arrays, count = await encode_tokens(model, texts, TOKEN_EMBEDDING, "vectors of tokens", role)
        vectors.append(dict(zip(texts, arrays, strict=True)))
        tokens += count
    size = sum(array.nbytes for arrays in vectors for array in arrays.values())
    queries, documents = vectors
    return await offload_if_large(size, _max_sims, queries, documents, pairs), tokens


def _max_sims(
    queries: Mapping[str, NDArray[np.float32]],
    documents: Mapping[str, NDArray[np.float32]],
    pairs: Sequence[tuple[str, str]],
) -> NDArray[np.float32]:
    return np.array([_max_sim(queries[query], documents[document]) for query, document in pairs], np.float32)


def _max_sim(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def _input_batches(
    model: ModelHandle, inputs: Sequence[Any], output: str, what: str, prompt_name: str | None
) -> list[dict[str, Tensor]]:
    name, tensor = (IDS, ids_tensor) if isinstance(inputs[0], list) else (TEXT, text_tensor)
    batches = [{name: tensor(name, part)} for part in _batches(inputs, model)]
    _check_encoder(model, output, what, (name,))
    if prompt_name is not None:
        if not any(spec.name == PROMPT for spec in model.config.inputs):
            raise field_error(PROMPT, f"is not taken: '{model.config.name}' has no prompts")
        for batch in batches:
            batch[PROMPT] = text_tensor(PROMPT, [prompt_name] * batch[name].shape[0])
    return batches


async def score_pairs(
    model: ModelHandle, pairs: Sequence[tuple[str, str]], what: str, item: str, instruction: str | None = None
) -> tuple[NDArray[np.float32], int]:
    """A model's score of each pair of texts, by a cross-encoder or by late interaction, and how many tokens they were.
    `instruction`: what makes a pair relevant, in place of the model's own.

    Raises `InvalidArgument` for a model that makes none, or several to `item`: `what` it makes none of; or for one that
    takes no instruction.
    """
    if makes(model.config, TOKEN_EMBEDDING) and not makes(model.config, SCORE, EMBEDDING):
        if instruction is not None:
            raise field_error(INSTRUCTION, f"is not taken: '{model.config.name}' compares vectors of tokens")
        return await late_interaction(model, pairs)
    _check_encoder(model, SCORE, what, (TEXT, PAIR))
    batches = [
        {TEXT: text_tensor(TEXT, [text for text, _ in part]), PAIR: text_tensor(PAIR, [pair for _, pair in part])}
        for part in _batches(pairs, model)
    ]
    if instruction is not None:
        if not any(spec.name == INSTRUCTION for spec in model.config.inputs):
            raise field_error(INSTRUCTION, f"is not taken: '{model.config.name}' has no template for one")
        for batch in batches:
            batch[INSTRUCTION] = text_tensor(INSTRUCTION, [instruction] * batch[TEXT].shape[0])
    values, tokens = await _encode(model, batches, SCORE)
    if (labels := values.shape[1]) != 1:
        raise field_error("model", f"'{model.config.name}' gives {labels} scores to {item}, not one")
    return values[:, 0], tokens


async def compare_pairs(
    model: ModelHandle, pairs: Sequence[tuple[str, str]], instruction: str | None = None
) -> tuple[NDArray[np.float32], int]:
    """As `score_pairs`, where a model of vectors gives the cosine of those of the two texts."""
    if not makes(model.config, EMBEDDING):
        return await score_pairs(model, pairs, "scores of pairs", "a pair", instruction)
    if instruction is not None:
        raise field_error(INSTRUCTION, f"is not taken: '{model.config.name}' compares vectors")
    texts = [text for pair in pairs for text in pair]
    vectors, tokens = await encode_inputs(model, texts, EMBEDDING, "embeddings")
    lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    unit = vectors / lengths
    return (unit[0::2] * unit[1::2]).sum(axis=1), tokens


async def classify_inputs(
    model: ModelHandle, inputs: Sequence[Any], prompt_name: str | None = None
) -> tuple[NDArray[np.float32], int]:
    """As `encode_inputs`, of the scores: those of several classes as probabilities, unless the model says that they are
    final."""
    scores, tokens = await encode_inputs(model, inputs, SCORE, "classes", prompt_name)
    final = model.config.parameters.get(FINAL_SCORES) == "true"
    return scores if final else _class_probabilities(scores), tokens


def _class_probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """What adds up to 1 already stays."""
    if scores.shape[1] == 1 or (scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3)):
        return scores
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float32] = raised / raised.sum(axis=1, keepdims=True)
    return probabilities


def _check_encoder(model: ModelHandle, output: str, what: str, inputs: Sequence[str]) -> None:
    inputs_there = {spec.name for spec in model.config.inputs}
    if not makes(model.config, output) or not inputs_there.issuperset(inputs):
        lacks = f"it lacks {', '.join(inputs)} or the output {output}"
        raise field_error("model", f"'{model.config.name}' makes no {what}: {lacks}")


async def _encode(
    model: ModelHandle, batches: Sequence[dict[str, Tensor]], output: str
) -> tuple[NDArray[np.float32], int]:
    results, tokens = await _run(model, batches, (output,))
    values = np.concatenate([np.atleast_2d(tensors[output].data.reshape(tensors[output].shape)) for tensors in results])
    return values, tokens


async def _run(
    model: ModelHandle, batches: Sequence[dict[str, Tensor]], wanted: tuple[str, ...]
) -> tuple[list[dict[str, Tensor]], int]:
    """The outputs of the batches, and how many tokens they were. They run at the same time; the first error ends the
    others."""
    outputs = (*wanted, COUNT) if makes(model.config, COUNT) else wanted
    requests = [InferRequest(inputs=inputs, outputs=outputs) for inputs in batches]
    try:
        async with RequestTaskGroup() as group:
            tasks = [group.create_task(_encode_batch(model, request)) for request in requests]
    except* CharoniaError as errors:
        raise _first(errors) from None
    results = [task.result() for task in tasks]
    return results, sum(int(tensors[COUNT].data.sum()) for tensors in results if COUNT in tensors)


async def _encode_batch(model: ModelHandle, request: InferRequest) -> dict[str, Tensor]:
    async with aclosing(model.infer(request)) as responses:
        async for response in responses:
            if response.outputs:
                return {tensor.name: tensor for tensor in response.outputs}
    raise Internal(f"model '{model.config.name}' made nothing")


def _first(errors: BaseExceptionGroup[CharoniaError]) -> CharoniaError:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _batches(items: Sequence[Any], model: ModelHandle) -> list[Sequence[Any]]:
    size = max(model.config.max_batch_size, 1)
    return [items[start : start + size] for start in range(0, len(items), size)]


def text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    """Texts as BYTES of shape [texts, 1]. Raises `InvalidArgument` for lone surrogates."""
    try:
        data = np.array([[text.encode()] for text in texts], object)
    except UnicodeEncodeError:
        raise InvalidArgument("a text is not valid Unicode", field="input") from None
    return Tensor(name, "BYTES", data.shape, data)


def ids_tensor(name: str, rows: Sequence[Sequence[int]]) -> Tensor:
    """Token ids as INT64 of shape [texts, longest], shorter rows padded at their end."""
    data = np.full((len(rows), max(map(len, rows))), NO_TOKEN, np.int64)
    for row, ids in zip(data, rows, strict=True):
        row[: len(ids)] = ids
    return Tensor(name, "INT64", data.shape, data)


def usage_of(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
