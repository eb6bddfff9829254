"""/v1/embeddings in OpenAI's format, and /v1/rerank, also under its other names, in Cohere's and Jina's.

Both become v2 inference requests: any model with an encoder's tensors serves them, an ensemble too.
"""

import base64
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

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
from ...core.tasks import RequestTaskGroup
from ...core.tensor import Tensor
from ..http.connection import CancelOnDisconnect, offload_if_large
from ..http.error_responses import json_response
from ..http.request_context import context_of, request_id_of
from .json_body import JsonBody, NoOpValues, decode_body, model_field, read_members

MAX_INPUTS = 2048
"""Texts of one request; OpenAI's limit."""

_EMBEDDINGS_NO_OP_VALUES: NoOpValues = {"truncate_prompt_tokens": (-1,)}
_RERANK_NO_OP_VALUES: NoOpValues = {
    **_EMBEDDINGS_NO_OP_VALUES,
    "rank_fields": (),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
}

TEXT, PAIR, IDS = "text_input", "text_pair", "input_ids"
EMBEDDING, SCORE, COUNT = "embedding", "score", "num_input_tokens"
_RERANK_PATHS = "/v1/rerank", "/v2/rerank", "/rerank"
"""Jina's clients ask the first, Cohere's the first or the second, and vLLM serves all of them."""
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


def parse_embeddings(members: JsonBody) -> EmbeddingsBody:
    """Parse a body of /v1/embeddings; its `input` becomes a list of texts, or a list of lists of token ids.

    Raises `InvalidArgument`, whose `field` names what is wrong.
    """
    body = decode_body(members, EmbeddingsBody, _EMBEDDINGS_NO_OP_VALUES)
    if body.encoding_format not in (None, "float", "base64"):
        message = f"encoding_format must be float or base64, got {body.encoding_format!r}"
        raise InvalidArgument(message, field="encoding_format")
    if body.dimensions is not None and body.dimensions < 1:
        raise InvalidArgument(f"dimensions must be at least 1, got {body.dimensions}", field="dimensions")
    several = [body.input] if isinstance(body.input, str) or _is_ids(body.input) else body.input
    if isinstance(several, list) and several:
        _check_count("input", len(several))
        if all(isinstance(each, str) and each for each in several) or all(map(_is_ids, several)):
            return msgspec.structs.replace(body, input=several)
    message = "input must be a string, a list of strings, a list of token ids or a list of such lists"
    raise InvalidArgument(f"{message}, none of them empty", field="input")


def parse_rerank(members: JsonBody) -> RerankBody:
    """Parse a body of /v1/rerank, whose `documents` all become texts. Raises `InvalidArgument`, naming the field."""
    body = decode_body(members, RerankBody, _RERANK_NO_OP_VALUES)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidArgument(f"top_n must be at least 1, got {body.top_n}", field="top_n")
    _check_count("documents", len(body.documents))
    documents: list[str | dict[str, str]] = []
    for index, document in enumerate(body.documents):
        if isinstance(document, dict) and set(document) != {"text"}:
            message = f"documents[{index}] must be a string, or an object with text alone"
            raise InvalidArgument(message, field=f"documents[{index}]")
        documents.append(document if isinstance(document, str) else document["text"])
    return msgspec.structs.replace(body, documents=documents)


def _is_ids(given: Any) -> bool:
    ids = isinstance(given, list) and set(map(type, given)) == {int}
    return ids and min(given) >= 0 and max(given) < 2**31


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidArgument(f"{name} must be 1 to {MAX_INPUTS}, got {count}", field=name)


class EncoderRoutes:
    """The endpoints and their handlers."""

    def __init__(self, gateway: Gateway, max_input_size: int) -> None:
        self._gateway = gateway
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    async def embeddings(self, request: Request) -> Response:
        body = parse_embeddings(await read_members(request, self._max_input_size))
        name, tensor = (IDS, _ids_tensor) if isinstance(body.input[0], list) else (TEXT, _text_tensor)
        model = await self._acquire(request, body.model, EMBEDDING, "embeddings", (name,))
        inputs = [{name: tensor(name, part)} for part in _batches(body.input, model)]
        body = msgspec.structs.replace(body, model=model.config.name)
        async with CancelOnDisconnect(request.receive):
            vectors, tokens = await _encode(model, inputs, EMBEDDING)
        content = await offload_if_large(vectors.nbytes, _embeddings_json, body, vectors, tokens)
        return Response(content, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        body = parse_rerank(await read_members(request, self._max_input_size))
        model = await self._acquire(request, body.model, SCORE, "scores of documents", (TEXT, PAIR))
        inputs = [
            {TEXT: _text_tensor(TEXT, [body.query] * len(part)), PAIR: _text_tensor(PAIR, part)}
            for part in _batches(body.documents, model)
        ]
        async with CancelOnDisconnect(request.receive):
            values, tokens = await _encode(model, inputs, SCORE)
        if (labels := values.shape[1]) != 1:
            raise InvalidArgument(f"model '{body.model}' gives {labels} scores to a document, not one", field="model")
        scores = values[:, 0].astype(float).tolist()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents:
            for each in results:
                each["document"] = {"text": body.documents[each["index"]]}
        response_id = f"rerank-{request_id_of(request.scope)}"
        return json_response(
            {"id": response_id, "model": model.config.name, "results": results, "usage": _usage(tokens)}
        )

    async def _acquire(self, request: Request, name: str, output: str, what: str, inputs: Sequence[str]) -> ModelHandle:
        with model_field():
            model = await self._gateway.acquire(context_of(request.scope), name)
        given, returned = ({spec.name for spec in specs} for specs in (model.config.inputs, model.config.outputs))
        if output not in returned or not given.issuperset(inputs):
            message = f"model '{name}' makes no {what}: it lacks {', '.join(inputs)} or the output {output}"
            raise InvalidArgument(message, field="model")
        return model


async def _encode(
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


def _batches(items: Sequence[Any], model: ModelHandle) -> list[Sequence[Any]]:
    size = max(model.config.max_batch_size, 1)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    try:
        data = np.array([[text.encode()] for text in texts], object)
    except UnicodeEncodeError:  # lone surrogates
        raise InvalidArgument("a text is not valid Unicode", field="input") from None
    return Tensor(name, "BYTES", data.shape, data)


def _ids_tensor(name: str, rows: Sequence[Sequence[int]]) -> Tensor:
    data = np.full((len(rows), max(map(len, rows))), _PADDING, np.int64)
    for row, ids in zip(data, rows, strict=True):
        row[: len(ids)] = ids
    return Tensor(name, "INT64", data.shape, data)


def _embeddings_json(body: EmbeddingsBody, vectors: NDArray[np.float32], tokens: int) -> bytes:
    """The response with `vectors` [texts, dimensions] as lists of numbers, or as base64 of little-endian floats."""
    encoded: Iterator[Any]
    vectors = vectors if body.dimensions is None else _cut(vectors, body.dimensions)
    if body.encoding_format == "base64":
        encoded = (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors)
    else:
        encoded = (row.astype(float).tolist() for row in vectors)
    # Vector by vector: orjson keeps the interpreter's lock, and all of them together may take it a second.
    data = (
        orjson.dumps({"object": "embedding", "index": index, "embedding": vector})
        for index, vector in enumerate(encoded)
    )
    rest = orjson.dumps({"model": body.model, "usage": _usage(tokens)})
    return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:]


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _cut(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Fewer dimensions, and length 1 again."""
    whole = vectors.shape[1]
    if dimensions > whole:
        message = f"dimensions must be at most {whole} for this model, got {dimensions}"
        raise InvalidArgument(message, field="dimensions")
    if dimensions == whole:
        return vectors
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    made: NDArray[np.float32] = (cut / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return made
