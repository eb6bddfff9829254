"""/score, /classify and /pooling of vLLM's API: scores of pairs of texts, classes of texts, and what a model makes of
them as it is. All become v2 inference requests to models with an encoder's tensors."""

import time
from typing import Any

import msgspec
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.encoder_tensors import SCORE
from ...core.errors import InvalidArgument
from ...core.gateway import ModelHandle, ModelLookup
from ..http.connection import CancelOnDisconnect, offload_if_large
from ..http.error_responses import json_response
from ..http.request_context import request_id_of
from ..size_limits import JSON_SHARE, MAX_RESPONSE_BYTES, response_too_large
from .embeddings import ENCODER_NO_OP_VALUES, check_encoding, encoded_rows
from .encoder_calls import (
    TASKS,
    acquire_encoder,
    check_count,
    choose_task,
    classify_inputs,
    compare_pairs,
    pool_inputs,
    several_inputs,
    usage_of,
)
from .json_body import BodyFormat, NoOpValues, field_error

_SIDES = (("queries", ("documents", "items")), ("text_1", ("text_2",)), ("data_1", ("data_2",)))
"""The names that the two sides of a comparison come by."""


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    instruction: str | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to compare: one text with each of several, or each with its own. Raises `InvalidArgument`."""
        sides = [(left, right) for left, rights in _SIDES for right in rights if getattr(self, right) is not None]
        if len(sides) != 1 or getattr(self, sides[0][0]) is None:
            message = "give queries with documents or items, text_1 with text_2, or data_1 with data_2"
            raise InvalidArgument(message, field="queries")
        [(left, right)] = sides
        texts, others = self._texts(left), self._texts(right)
        texts = texts * len(others) if len(texts) == 1 else texts
        if len(texts) != len(others):
            raise field_error(left, f"has {len(texts)} texts, and {right} {len(others)}: give one, or as many")
        return list(zip(texts, others, strict=True))

    def _texts(self, name: str) -> list[str]:
        value = getattr(self, name)
        texts = [value] if isinstance(value, str) else value
        check_count(name, len(texts))
        return texts


class ClassifyBody(msgspec.Struct, frozen=True, kw_only=True):
    input: Any
    model: str | None = None


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /pooling; a `task` of None takes what the model makes first, in the order of `TASKS`."""

    input: Any
    model: str | None = None
    prompt_name: str | None = None
    task: str | None = None
    encoding_format: str | None = None


_NO_OP_VALUES: NoOpValues = {**ENCODER_NO_OP_VALUES, "prompt_name": ()}
_SCORE = BodyFormat(ScoreBody, _NO_OP_VALUES)
_CLASSIFY = BodyFormat(ClassifyBody, {**_NO_OP_VALUES, "instruction": ()})
_POOLING = BodyFormat(PoolingBody, {**ENCODER_NO_OP_VALUES, "instruction": (), "dimensions": ()})


class ScoringRoutes:
    def __init__(self, lookup: ModelLookup, max_input_size: int, max_response_size: int = MAX_RESPONSE_BYTES) -> None:
        """`max_response_size`: bytes of what /pooling returns: vectors of tokens are far longer than texts."""
        self._lookup = lookup
        self._max_input_size = max_input_size
        self._max_response_size = max_response_size

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.score, methods=["POST"]) for path in ("/score", "/v1/score")),
            Route("/classify", self.classify, methods=["POST"]),
            Route("/pooling", self.pooling, methods=["POST"]),
        ]

    async def score(self, request: Request) -> Response:
        body = await _SCORE.read(request, self._max_input_size)
        pairs = body.pairs()
        model = await acquire_encoder(self._lookup, request, body.model)
        async with CancelOnDisconnect(request.receive):
            values, tokens = await compare_pairs(model, pairs, body.instruction)
        data = [{"index": index, "object": "score", "score": float(value)} for index, value in enumerate(values)]
        return _listed(request, "score", model, data, tokens)

    async def classify(self, request: Request) -> Response:
        body = await _CLASSIFY.read(request, self._max_input_size)
        inputs = several_inputs(body.input)
        model = await acquire_encoder(self._lookup, request, body.model)
        async with CancelOnDisconnect(request.receive):
            values, tokens = await classify_inputs(model, inputs)
        labels = model.config.labels.get(SCORE, ())
        data = []
        for index, row in enumerate(values):
            best = int(row.argmax())
            label = labels[best] if best < len(labels) else f"LABEL_{best}"
            probs = row.astype(float).tolist()
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return _listed(request, "classify", model, data, tokens)

    async def pooling(self, request: Request) -> Response:
        body = await _POOLING.read(request, self._max_input_size)
        check_encoding(body.encoding_format)
        inputs = several_inputs(body.input)
        model = await acquire_encoder(self._lookup, request, body.model)
        task = choose_task(model.config, body.task)
        async with CancelOnDisconnect(request.receive):
            arrays, tokens = await pool_inputs(model, inputs, task, body.prompt_name)
        size = sum(array.nbytes for array in arrays)
        as_json = body.encoding_format != "base64"
        limit = self._max_response_size // JSON_SHARE if as_json else self._max_response_size
        if size > limit:
            raise response_too_large(TASKS[task], size, limit, as_json)
        head = _head(request, "pool", model)
        return await offload_if_large(size, _pooled, head, arrays, body.encoding_format, usage_of(tokens))


def _pooled(head: dict[str, Any], arrays: list[NDArray[Any]], encoding: str | None, usage: dict[str, int]) -> Response:
    """The answer of /pooling, down to its bytes."""
    rows = _pooled_rows(arrays, encoding)
    data = [{"index": index, "object": "pooling", "data": row} for index, row in enumerate(rows)]
    return json_response({**head, "data": data, "usage": usage})


def _pooled_rows(arrays: list[NDArray[Any]], encoding: str | None) -> list[Any]:
    """Vectors as lists or base64; rows of vectors as lists of lists, or one after the other as base64."""
    if encoding == "base64" or arrays[0].ndim == 1:
        return [row for array in arrays for row in encoded_rows(array.reshape(1, -1), encoding)]
    return [list(encoded_rows(array, encoding)) for array in arrays]


def _listed(request: Request, kind: str, model: ModelHandle, data: list[dict[str, Any]], tokens: int) -> Response:
    return json_response({**_head(request, kind, model), "data": data, "usage": usage_of(tokens)})


def _head(request: Request, kind: str, model: ModelHandle) -> dict[str, Any]:
    name = {"id": f"{kind}-{request_id_of(request.scope)}", "object": "list", "created": int(time.time())}
    return {**name, "model": model.config.name}
