"""Bodies of /v1/embeddings and /v1/rerank, decoded and checked; and vectors in the encoding that a body asks for."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from .json_body import JsonBody, decode_body

MAX_INPUTS = 2048
"""Texts of one request; OpenAI's limit."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": (-1,)}
_RERANK_NEUTRAL: dict[str, tuple[Any, ...]] = {"rank_fields": (), "max_chunks_per_doc": (), "max_tokens_per_doc": ()}


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
    fields = decode_body(body, EmbeddingsBody, _NEUTRAL)
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
    fields = decode_body(body, RerankBody, _RERANK_NEUTRAL)
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
