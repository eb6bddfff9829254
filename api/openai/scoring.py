"""/score, /classify and /pooling of vLLM's API: scores of pairs of texts, classes of texts, and what a model makes of
them as it is. All become v2 inference requests to models with an encoder's tensors."""

import time
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument
from ...core.gateway import ModelHandle, ModelLookup
from ..http.connection import CancelOnDisconnect
from ..http.error_responses import json_response
from ..http.request_context import request_id_of
from .embeddings import ENCODER_NO_OP_VALUES, encoded_rows
from .encoder_calls import (
    EMBEDDING,
    PAIR,
    SCORE,
    TEXT,
    acquire_encoder,
    check_count,
    check_encoder,
    encode,
    input_tensors,
    makes,
    pair_tensors,
    several_inputs,
    usage_of,
)
from .json_body import JsonBody, NoOpValues, body_shape, decode_body, field_error, read_members
from .known_fields import Shape

_SIDES = (("queries", ("documents", "items")), ("text_1", ("text_2",)), ("data_1", ("data_2",)))
"""The names that the two sides of a comparison come by."""


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to compare: one text with each of several, or each with its own. Raises `InvalidArgument`."""
        given = [(one, other) for one, others in _SIDES for other in others if getattr(self, other) is not None]
        if len(given) != 1 or getattr(self, given[0][0]) is None:
            message = "give queries with documents or items, text_1 with text_2, or data_1 with data_2"
            raise InvalidArgument(message, field="queries")
        one, other = (_texts(getattr(self, name), name) for name in given[0])
        one = one * len(other) if len(one) == 1 else one
        if len(one) != len(other):
            name = given[0][0]
            raise field_error(name, f"has {len(one)} texts, and {given[0][1]} {len(other)}: give one, or as many")
        return list(zip(one, other, strict=True))


def _texts(given: str | list[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    check_count(name, len(texts))
    return texts


class ClassifyBody(msgspec.Struct, frozen=True, kw_only=True):
    input: Any
    model: str | None = None


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True):
    """`task`: None is what the model makes."""

    input: Any
    model: str | None = None
    task: str | None = None
    encoding_format: str | None = None


_POOLING_NO_OP_VALUES: NoOpValues = {**ENCODER_NO_OP_VALUES, "dimensions": ()}
_SCORE_SHAPE = body_shape(ScoreBody.__struct_fields__, ENCODER_NO_OP_VALUES)
_CLASSIFY_SHAPE = body_shape(ClassifyBody.__struct_fields__, ENCODER_NO_OP_VALUES)
_POOLING_SHAPE = body_shape(PoolingBody.__struct_fields__, _POOLING_NO_OP_VALUES)


class ScoringRoutes:
    """The endpoints and their handlers."""

    def __init__(self, lookup: ModelLookup, max_input_size: int) -> None:
        self._lookup = lookup
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.score, methods=["POST"]) for path in ("/score", "/v1/score")),
            Route("/classify", self.classify, methods=["POST"]),
            Route("/pooling", self.pooling, methods=["POST"]),
        ]

    async def score(self, request: Request) -> Response:
        body = decode_body(await self._read(request, _SCORE_SHAPE), ScoreBody, ENCODER_NO_OP_VALUES)
        pairs = body.pairs()
        model = await acquire_encoder(self._lookup, request, body.model)
        async with CancelOnDisconnect(request.receive):
            values, tokens = await self._compare(model, pairs)
        data = [{"index": index, "object": "score", "score": float(value)} for index, value in enumerate(values)]
        return _listed(request, "score", model, data, tokens)

    async def _compare(self, model: ModelHandle, pairs: list[tuple[str, str]]) -> tuple[NDArray[np.float32], int]:
        """The score of each pair: a cross-encoder's own, or the cosine of a model's vectors."""
        if makes(model, EMBEDDING):
            check_encoder(model, EMBEDDING, "embeddings", (TEXT,))
            sides = [text for pair in pairs for text in pair]
            vectors, tokens = await encode(model, input_tensors(model, sides)[1], EMBEDDING)
            lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
            unit = vectors / lengths
            return (unit[0::2] * unit[1::2]).sum(axis=1), tokens
        check_encoder(model, SCORE, "scores of pairs", (TEXT, PAIR))
        values, tokens = await encode(model, pair_tensors(model, pairs), SCORE)
        if (labels := values.shape[1]) != 1:
            raise field_error("model", f"'{model.config.name}' gives {labels} scores to a pair, not one")
        return values[:, 0], tokens

    async def classify(self, request: Request) -> Response:
        body = decode_body(await self._read(request, _CLASSIFY_SHAPE), ClassifyBody, ENCODER_NO_OP_VALUES)
        texts = several_inputs(body.input)
        model = await acquire_encoder(self._lookup, request, body.model)
        name, inputs = input_tensors(model, texts)
        check_encoder(model, SCORE, "classes", (name,))
        async with CancelOnDisconnect(request.receive):
            values, tokens = await encode(model, inputs, SCORE)
        labels = model.config.labels.get(SCORE, ())
        data = []
        for index, row in enumerate(_probabilities(values)):
            best = int(row.argmax())
            label = labels[best] if best < len(labels) else f"LABEL_{best}"
            probs = row.astype(float).tolist()
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return _listed(request, "classify", model, data, tokens)

    async def pooling(self, request: Request) -> Response:
        body = decode_body(await self._read(request, _POOLING_SHAPE), PoolingBody, _POOLING_NO_OP_VALUES)
        if body.encoding_format not in (None, "float", "base64"):
            raise field_error("encoding_format", f"must be float or base64, got {body.encoding_format!r}")
        texts = several_inputs(body.input)
        model = await acquire_encoder(self._lookup, request, body.model)
        output = EMBEDDING if makes(model, EMBEDDING) else SCORE
        task = "embed" if output == EMBEDDING else "classify"
        if body.task not in (None, task):
            raise field_error("task", f": model '{model.config.name}' does {task}, not {body.task[:40]}")
        name, inputs = input_tensors(model, texts)
        check_encoder(model, output, "vectors or classes", (name,))
        async with CancelOnDisconnect(request.receive):
            values, tokens = await encode(model, inputs, output)
        values = values if output == EMBEDDING else _probabilities(values)
        rows = enumerate(encoded_rows(values, body.encoding_format))
        return _listed(
            request, "pool", model, [{"index": at, "object": "pooling", "data": row} for at, row in rows], tokens
        )

    async def _read(self, request: Request, shape: Shape) -> JsonBody:
        return await read_members(request, self._max_input_size, shape)


def _probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """A model's scores of several classes as probabilities; what adds up to 1 already stays."""
    if scores.shape[1] == 1 or (scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3)):
        return scores
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    made: NDArray[np.float32] = raised / raised.sum(axis=1, keepdims=True)
    return made


def _listed(request: Request, kind: str, model: ModelHandle, data: list[dict[str, Any]], tokens: int) -> Response:
    head = {"id": f"{kind}-{request_id_of(request.scope)}", "object": "list", "created": int(time.time())}
    return json_response({**head, "model": model.config.name, "data": data, "usage": usage_of(tokens)})
