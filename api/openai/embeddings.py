"""/v1/embeddings in OpenAI's format, and /v1/rerank in Cohere's and Jina's.

Both become v2 inference requests: any model with an encoder's tensors serves them, an ensemble too.
"""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import CharoniaError, Internal, InvalidArgument
from ...core.gateway import Gateway, ModelHandle
from ...core.request import InferRequest
from ...core.tensor import Tensor
from ..http.connection import CancelOnDisconnect, offload_if_large
from ..http.error_responses import json_response
from ..http.request_context import context_of, request_id_of
from .json_body import JsonBody, NoOpValues, decode_body, model_field, read_members

MAX_INPUTS = 2048
"""Texts of one request; OpenAI's limit."""

_EMBEDDINGS_NO_OP_VALUES: NoOpValues = {"truncate_prompt_tokens": (-1,)}
_RERANK_NO_OP_VALUES: NoOpValues = {"rank_fields": (), "max_chunks_per_doc": (), "max_tokens_per_doc": ()}

TEXT, PAIR, IDS = "text_input", "text_pair", "input_ids"
EMBEDDING, SCORE, COUNT = "embedding", "score", "num_input_tokens"
_PADDING = -1
"""Fills the rows of token ids that are shorter than the longest."""


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    input: Any
    encoding_format: str | None = None
    dimensions: int | None = None


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    query: str
    documents: list[str | dict[str, str]]
    top_n: int | None = None
    return_documents: bool | None = None


class EmbeddingRequest(NamedTuple):
    """A parsed body of /v1/embeddings, with either `texts` or token `ids`.

    `dimensions`: how many of each vector's first dimensions to keep, None for all.
    """

    model: str
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    base64: bool
    dimensions: int | None


class RerankRequest(NamedTuple):
    """A parsed body of /v1/rerank. `top_n`: how many results to return, None for all."""

    id: str
    model: str
    query: str
    documents: Sequence[str]
    top_n: int | None
    return_documents: bool


def parse_embeddings(body: JsonBody) -> EmbeddingRequest:
    """Parse a body of /v1/embeddings. Raises `InvalidArgument`, whose `field` names what is wrong."""
    fields = decode_body(body, EmbeddingsBody, _EMBEDDINGS_NO_OP_VALUES)
    if fields.encoding_format not in (None, "float", "base64"):
        message = f"encoding_format must be float or base64, got {fields.encoding_format!r}"
        raise InvalidArgument(message, field="encoding_format")
    if fields.dimensions is not None and fields.dimensions < 1:
        raise InvalidArgument(f"dimensions must be at least 1, got {fields.dimensions}", field="dimensions")
    texts, ids = _inputs(fields.input)
    return EmbeddingRequest(fields.model, texts, ids, fields.encoding_format == "base64", fields.dimensions)


def parse_rerank(body: JsonBody, request_id: str) -> RerankRequest:
    """Parse a body of /v1/rerank; the response's id is `rerank-` and `request_id`.

    Raises:
        InvalidArgument: `field` names what is wrong.
    """
    fields = decode_body(body, RerankBody, _RERANK_NO_OP_VALUES)
    if fields.top_n is not None and fields.top_n < 1:
        raise InvalidArgument(f"top_n must be at least 1, got {fields.top_n}", field="top_n")
    _check_count("documents", len(fields.documents))
    documents = [_document(index, each) for index, each in enumerate(fields.documents)]
    wanted = bool(fields.return_documents)
    return RerankRequest(f"rerank-{request_id}", fields.model, fields.query, documents, fields.top_n, wanted)


def _document(index: int, given: str | dict[str, str]) -> str:
    if isinstance(given, str):
        return given
    if set(given) != {"text"}:
        message = f"documents[{index}] must be a string, or an object with text alone"
        raise InvalidArgument(message, field=f"documents[{index}]")
    return given["text"]


def _inputs(given: Any) -> tuple[list[str], list[list[int]]]:
    """The texts, or else the lists of token ids, of the `input`: one text, texts, token ids or lists of those."""
    several = [given] if isinstance(given, str) or _is_ids(given) else given
    if isinstance(several, list) and several:
        _check_count("input", len(several))
        if all(isinstance(each, str) and each for each in several):
            return several, []
        if all(_is_ids(each) for each in several):
            return [], several
    message = "input must be a string, a list of strings, a list of token ids or a list of such lists"
    raise InvalidArgument(f"{message}, none of them empty", field="input")


def _is_ids(given: Any) -> bool:
    ids = isinstance(given, list) and set(map(type, given)) == {int}
    return ids and min(given) >= 0 and max(given) < 2**31


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidArgument(f"{name} must be 1 to {MAX_INPUTS}, got {count}", field=name)


class EncoderResult(NamedTuple):
    """The output of an encoder: a row of `values` for each text, and how many `tokens` the texts were in all."""

    values: NDArray[np.float32]
    tokens: int


class EncoderRoutes:
    """The endpoints and their handlers."""

    def __init__(self, gateway: Gateway, max_input_size: int) -> None:
        self._gateway = gateway
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/rerank", self.rerank, methods=["POST"]),
        ]

    async def embeddings(self, request: Request) -> Response:
        parsed = parse_embeddings(await read_members(request, self._max_input_size))
        model = self._acquire(request, parsed.model, EMBEDDING, "embeddings", (IDS if parsed.ids else TEXT,))
        inputs = [{IDS: _ids_tensor(part)} for part in _batches(parsed.ids, model)]
        inputs += [{TEXT: _text_tensor(TEXT, part)} for part in _batches(parsed.texts, model)]
        async with CancelOnDisconnect(request.receive):
            result = await _encode(model, inputs, EMBEDDING)
        body = await offload_if_large(result.values.nbytes, _embeddings_json, parsed, result)
        return Response(body, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        members = await read_members(request, self._max_input_size)
        parsed = parse_rerank(members, request_id_of(request.scope))
        model = self._acquire(request, parsed.model, SCORE, "scores of documents", (TEXT, PAIR))
        inputs = [
            {TEXT: _text_tensor(TEXT, [parsed.query] * len(part)), PAIR: _text_tensor(PAIR, part)}
            for part in _batches(parsed.documents, model)
        ]
        async with CancelOnDisconnect(request.receive):
            result = await _encode(model, inputs, SCORE)
        if (labels := result.values.shape[1]) != 1:
            raise InvalidArgument(f"model '{parsed.model}' gives {labels} scores to a document, not one", field="model")
        return json_response(_rerank_body(parsed, result))

    def _acquire(self, request: Request, name: str, output: str, what: str, inputs: Sequence[str]) -> ModelHandle:
        with model_field():
            model = self._gateway.acquire(context_of(request.scope), name)
        given, returned = ({spec.name for spec in specs} for specs in (model.config.inputs, model.config.outputs))
        if output not in returned or not given.issuperset(inputs):
            message = f"model '{name}' makes no {what}: it lacks {', '.join(inputs)} or the output {output}"
            raise InvalidArgument(message, field="model")
        return model


async def _encode(model: ModelHandle, inputs: Sequence[dict[str, Tensor]], output: str) -> EncoderResult:
    """The result of all batches, which run at the same time; the first error ends the others."""
    wanted = (output, COUNT) if any(spec.name == COUNT for spec in model.config.outputs) else (output,)
    requests = [InferRequest(inputs=each, outputs=wanted) for each in inputs]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_encode_batch(model, request)) for request in requests]
    except* CharoniaError as errors:
        raise _first(errors) from None
    outputs = [task.result() for task in tasks]
    values = np.concatenate([np.atleast_2d(each[output].data.reshape(each[output].shape)) for each in outputs])
    return EncoderResult(values, sum(int(each[COUNT].data.sum()) for each in outputs if COUNT in each))


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


def _text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    try:
        data = np.array([[text.encode()] for text in texts], object)
    except UnicodeEncodeError:  # lone surrogates
        raise InvalidArgument("a text is not valid Unicode", field="input") from None
    return Tensor(name, "BYTES", data.shape, data)


def _ids_tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    data = np.full((len(rows), max(map(len, rows))), _PADDING, np.int64)
    for row, ids in zip(data, rows, strict=True):
        row[: len(ids)] = ids
    return Tensor(IDS, "INT64", data.shape, data)


def _embeddings_json(parsed: EmbeddingRequest, result: EncoderResult) -> bytes:
    # Vector by vector: orjson keeps the interpreter's lock, and all of them together may take it a second.
    data = (
        orjson.dumps({"object": "embedding", "index": index, "embedding": vector})
        for index, vector in enumerate(encode_vectors(result.values, parsed))
    )
    usage = {"prompt_tokens": result.tokens, "total_tokens": result.tokens}
    rest = orjson.dumps({"model": parsed.model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:]


def _rerank_body(parsed: RerankRequest, result: EncoderResult) -> dict[str, Any]:
    scores = result.values[:, 0].astype(float).tolist()
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: parsed.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if parsed.return_documents:
        for each in results:
            each["document"] = {"text": parsed.documents[each["index"]]}
    return {"id": parsed.id, "model": parsed.model, "results": results, "usage": {"total_tokens": result.tokens}}


def encode_vectors(values: NDArray[np.float32], asked: EmbeddingRequest) -> Iterator[Any]:
    """Each row of `values` [texts, dimensions] as a list of numbers, or as the base64 of its little-endian floats.

    Vectors cut to fewer dimensions are scaled to length 1 again.

    Raises:
        InvalidArgument: more dimensions are asked for than there are.
    """
    if asked.dimensions is not None:
        values = _cut(values, asked.dimensions)
    if not asked.base64:
        return (row.astype(float).tolist() for row in values)
    return (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in values)


def _cut(values: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    whole = values.shape[1]
    if dimensions > whole:
        message = f"dimensions must be at most {whole} for this model, got {dimensions}"
        raise InvalidArgument(message, field="dimensions")
    if dimensions == whole:
        return values
    cut = values[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    made: NDArray[np.float32] = (cut / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return made
