"""Vectors and scores of texts: /v1/embeddings in OpenAI's shape, /v1/rerank in Cohere's and Jina's.

Both translate to `infer`, so whatever has an encoder's tensors can serve them, an ensemble too.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import CharoniaError, Internal, InvalidArgument, NotFound
from ...core.gateway import Gateway, ModelHandle
from ...core.model import ModelConfig
from ...core.request import InferRequest
from ...core.tensor import Tensor
from ..http.connection import CancelOnDisconnect, offload_if_large, read_json_body
from ..http.error_responses import json_response
from ..http.request_context import context_of
from ..http.request_ids import request_id_of
from .embedding_schemas import EmbeddingRequest, RerankRequest, encode_vectors, parse_embeddings, parse_rerank
from .json_body import JsonBody, load_body

TEXT, PAIR, IDS = "text_input", "text_pair", "input_ids"
EMBEDDING, SCORE, COUNT = "embedding", "score", "num_input_tokens"
_FILL = -1
"""Stands behind the ids of a row that is shorter than others."""


class EncoderResult(NamedTuple):
    """What a model made of texts: a row of `values` each, and how many `tokens` they were in all."""

    values: NDArray[np.float32]
    tokens: int


class EncoderRoutes:
    """The door's handlers."""

    def __init__(self, gateway: Gateway, max_input_size: int) -> None:
        self._gateway = gateway
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/rerank", self.rerank, methods=["POST"]),
        ]

    async def embeddings(self, request: Request) -> Response:
        asked = parse_embeddings(await self._body(request))
        model = self._acquire(request, asked.model, EMBEDDING, "embeddings", (IDS if asked.ids else TEXT,))
        async with CancelOnDisconnect(request.receive):
            made = await _ask(model, _embedding_inputs(asked, model.config), EMBEDDING)
        body = await offload_if_large(made.values.nbytes, _embeddings_json, asked, made)
        return Response(body, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        asked = parse_rerank(await self._body(request), request_id_of(request.scope))
        model = self._acquire(request, asked.model, SCORE, "scores of documents", (TEXT, PAIR))
        inputs = [
            {TEXT: _texts(TEXT, [asked.query] * len(part)), PAIR: _texts(PAIR, part)}
            for part in _parts(asked.documents, model.config)
        ]
        async with CancelOnDisconnect(request.receive):
            made = await _ask(model, inputs, SCORE)
        if made.values.shape[1] != 1:
            labels = made.values.shape[1]
            raise InvalidArgument(f"model '{asked.model}' gives {labels} scores to a document, not one", field="model")
        return json_response(_rerank_body(asked, made))

    async def _body(self, request: Request) -> JsonBody:
        return await load_body(await read_json_body(request, self._max_input_size))

    def _acquire(self, request: Request, name: str, output: str, what: str, inputs: Sequence[str]) -> ModelHandle:
        try:
            model = self._gateway.acquire(context_of(request.scope), name)
        except NotFound as error:
            raise NotFound(error.message, field="model") from None
        config = model.config
        given = {spec.name for spec in config.inputs}
        if output not in {spec.name for spec in config.outputs} or not given.issuperset(inputs):
            message = f"model '{name}' makes no {what}: it lacks {', '.join(inputs)} or the output {output}"
            raise InvalidArgument(message, field="model")
        return model


async def _ask(model: ModelHandle, inputs: Sequence[dict[str, Tensor]], output: str) -> EncoderResult:
    """Ask for all parts at once; the first error ends the others."""
    wanted = (output, COUNT) if any(spec.name == COUNT for spec in model.config.outputs) else (output,)
    requests = [InferRequest(inputs=each, outputs=wanted) for each in inputs]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask_part(model, request)) for request in requests]
    except* CharoniaError as errors:
        raise _first(errors) from None
    made = [task.result() for task in tasks]
    values = np.concatenate([np.atleast_2d(each[output].data.reshape(each[output].shape)) for each in made])
    return EncoderResult(values, sum(int(each[COUNT].data.sum()) for each in made if COUNT in each))


async def _ask_part(model: ModelHandle, request: InferRequest) -> dict[str, Tensor]:
    async with aclosing(model.infer(request)) as responses:
        async for response in responses:
            if response.outputs:
                return {tensor.name: tensor for tensor in response.outputs}
    raise Internal(f"model '{model.config.name}' made nothing")


def _first(errors: BaseExceptionGroup[CharoniaError]) -> CharoniaError:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _parts(items: Sequence[Any], config: ModelConfig) -> list[Sequence[Any]]:
    size = max(config.max_batch_size, 1)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _embedding_inputs(asked: EmbeddingRequest, config: ModelConfig) -> list[dict[str, Tensor]]:
    if not asked.ids:
        return [{TEXT: _texts(TEXT, part)} for part in _parts(asked.texts, config)]
    return [{IDS: _ids(part)} for part in _parts(asked.ids, config)]


def _texts(name: str, texts: Sequence[str]) -> Tensor:
    try:
        data = np.array([[text.encode()] for text in texts], object)
    except UnicodeEncodeError:  # lone surrogates
        raise InvalidArgument("a text is not valid Unicode", field="input") from None
    return Tensor(name, "BYTES", data.shape, data)


def _ids(rows: Sequence[Sequence[int]]) -> Tensor:
    data = np.full((len(rows), max(map(len, rows))), _FILL, np.int64)
    for row, ids in zip(data, rows, strict=True):
        row[: len(ids)] = ids
    return Tensor(IDS, "INT64", data.shape, data)


def _embeddings_json(asked: EmbeddingRequest, made: EncoderResult) -> bytes:
    """Made vector by vector: orjson keeps the interpreter's lock, and all of them together may take it a second."""
    data = (
        orjson.dumps({"object": "embedding", "index": index, "embedding": shown})
        for index, shown in enumerate(encode_vectors(made.values, asked))
    )
    usage = {"prompt_tokens": made.tokens, "total_tokens": made.tokens}
    rest = orjson.dumps({"model": asked.model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:]


def _rerank_body(asked: RerankRequest, made: EncoderResult) -> dict[str, Any]:
    scores = made.values[:, 0].astype(float).tolist()
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if asked.return_documents:
        for result in results:
            result["document"] = {"text": asked.documents[result["index"]]}
    return {"id": asked.id, "model": asked.model, "results": results, "usage": {"total_tokens": made.tokens}}
