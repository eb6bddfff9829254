"""/v1/embeddings in OpenAI's format, and /v1/rerank, also under its other names, in Cohere's and Jina's.

Both become v2 inference requests: any model with an encoder's tensors serves them, an ensemble too.
"""

import base64
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.encoder_tensors import EMBEDDING
from ...core.gateway import ModelLookup
from ..http.connection import CancelOnDisconnect, offload_if_large
from ..http.error_responses import json_response
from ..http.request_context import request_id_of
from .encoder_calls import (
    acquire_encoder,
    check_count,
    encode_inputs,
    score_pairs,
    several_inputs,
    usage_of,
)
from .json_body import BodyFormat, NoOpValues, field_error

ENCODER_NO_OP_VALUES: NoOpValues = {
    "truncate_prompt_tokens": (-1,),
    "truncation_side": ("right",),
    "add_special_tokens": (True,),
    "normalize": (True,),
    "use_activation": (True,),
    "activation": (True,),
    "padding": ("do_not_pad",),
    "priority": (0,),
    "cache_salt": (),
    "mm_processor_kwargs": ({},),
    "messages": (),
    "chat_template": (),
    "input_type": (),
    "late_chunking": (False,),
    "truncate": ("END", "end", True),
}
"""Fields that would change vectors and scores, and are not served. Long texts are cut at their end."""

_EMBEDDINGS_NO_OP_VALUES: NoOpValues = {
    **ENCODER_NO_OP_VALUES,
    "instruction": (),
    "task": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "embedding_types": (["float"],),
    "output_dtype": ("float",),
    "output_dimension": (),
}
_RERANK_NO_OP_VALUES: NoOpValues = {
    **ENCODER_NO_OP_VALUES,
    "prompt_name": (),
    "rank_fields": (),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
}

_RERANK_PATHS = "/v1/rerank", "/v2/rerank", "/rerank"
"""Jina's clients ask the first, Cohere's the first or the second, and vLLM serves all of them."""


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    input: Any
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    documents: list[str | dict[str, str]]
    model: str | None = None
    instruction: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


_EMBEDDINGS = BodyFormat(EmbeddingsBody, _EMBEDDINGS_NO_OP_VALUES)
_RERANK = BodyFormat(RerankBody, _RERANK_NO_OP_VALUES)


class EncoderRoutes:
    def __init__(self, lookup: ModelLookup, max_input_size: int) -> None:
        self._lookup = lookup
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    async def embeddings(self, request: Request) -> Response:
        body = await _EMBEDDINGS.read(request, self._max_input_size)
        check_encoding(body.encoding_format)
        if body.dimensions is not None and body.dimensions < 1:
            raise field_error("dimensions", f"must be at least 1, got {body.dimensions}")
        inputs = several_inputs(body.input)
        model = await acquire_encoder(self._lookup, request, body.model)
        head = {"id": f"embd-{request_id_of(request.scope)}", "created": int(time.time()), "model": model.config.name}
        async with CancelOnDisconnect(request.receive):
            vectors, tokens = await encode_inputs(model, inputs, EMBEDDING, "embeddings", body.prompt_name)
        content = await offload_if_large(vectors.nbytes, _embeddings_json, body, head, vectors, tokens)
        return Response(content, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        body = await _RERANK.read(request, self._max_input_size)
        if body.top_n is not None and body.top_n < 1:
            raise field_error("top_n", f"must be at least 1, got {body.top_n}")
        check_count("documents", len(body.documents))
        documents = [_document_text(document, index) for index, document in enumerate(body.documents)]
        model = await acquire_encoder(self._lookup, request, body.model)
        pairs = [(body.query, document) for document in documents]
        async with CancelOnDisconnect(request.receive):
            values, tokens = await score_pairs(model, pairs, "scores of documents", "a document", body.instruction)
        scores = values.astype(float).tolist()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        response_id = f"rerank-{request_id_of(request.scope)}"
        return json_response(
            {"id": response_id, "model": model.config.name, "results": results, "usage": usage_of(tokens)}
        )


def _document_text(document: str | dict[str, str], index: int) -> str:
    if isinstance(document, str):
        return document
    if set(document) != {"text"}:
        raise field_error(f"documents[{index}]", "must be a string, or an object with text alone")
    return document["text"]


def check_encoding(encoding: str | None) -> None:
    """Raises `InvalidArgument` for an `encoding_format` that vectors have not."""
    if encoding not in (None, "float", "base64"):
        raise field_error("encoding_format", f"must be float or base64, got {encoding!r}")


def _embeddings_json(body: EmbeddingsBody, head: dict[str, Any], vectors: NDArray[np.float32], tokens: int) -> bytes:
    """The response with `vectors` [texts, dimensions], after the members of `head`."""
    vectors = vectors if body.dimensions is None else _cut(vectors, body.dimensions)
    encoded = encoded_rows(vectors, body.encoding_format)
    # Vector by vector: orjson keeps the interpreter's lock, and all of them together may take it a second.
    data = (
        orjson.dumps({"object": "embedding", "index": index, "embedding": vector})
        for index, vector in enumerate(encoded)
    )
    rest = orjson.dumps({**head, "usage": usage_of(tokens)})
    return b'{"object":"list","data":[' + b",".join(data) + b"]," + rest[1:]


def encoded_rows(rows: NDArray[np.float32], encoding: str | None) -> Iterator[Any]:
    """Rows as lists of numbers, or, with `base64`, as that of little-endian floats."""
    if encoding == "base64":
        return (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows)
    return (row.astype(float).tolist() for row in rows)


def _cut(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Vectors [texts, dimensions] cut to fewer dimensions, and of length 1 again."""
    whole = vectors.shape[1]
    if dimensions > whole:
        raise field_error("dimensions", f"must be at most {whole} for this model, got {dimensions}")
    if dimensions == whole:
        return vectors
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    made: NDArray[np.float32] = (cut / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return made
