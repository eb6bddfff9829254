"""What an encoder makes of a program's texts, in the server's event loop: vectors, classes, scores."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..api.openai.encoder_calls import choose_task, classify_inputs, compare_pairs, encode_inputs, pool_inputs
from ..core.encoder_tensors import EMBEDDING
from ..core.errors import InvalidArgument
from ..core.gateway import ModelHandle
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .prompts import given_prompts

Ask: TypeAlias = Callable[[Callable[[ModelHandle], Coroutine[Any, Any, Any]]], Coroutine[Any, Any, Any]]
"""Gives a coroutine function the model, within a request."""

_Encode: TypeAlias = Callable[[ModelHandle, list[Any]], Coroutine[Any, Any, tuple[NDArray[Any], int]]]
"""Rows of a model for inputs, and how many tokens these were."""


class Pooler:
    """Asks one encoder. Its methods raise `InvalidArgument` for a model that does not what is wanted of it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def embed(self, prompts: Any) -> list[EmbeddingRequestOutput]:
        inputs, vectors = await self._rows(prompts, _embed)
        return [
            EmbeddingRequestOutput(str(index), EmbeddingOutput(vector.tolist()), _given_ids(value))
            for index, (vector, value) in enumerate(zip(vectors, inputs, strict=True))
        ]

    async def classify(self, prompts: Any) -> list[ClassificationRequestOutput]:
        inputs, rows = await self._rows(prompts, classify_inputs)
        return [
            ClassificationRequestOutput(str(index), ClassificationOutput(row.tolist()), _given_ids(value))
            for index, (row, value) in enumerate(zip(rows, inputs, strict=True))
        ]

    async def encode(self, prompts: Any, task: str | None) -> list[PoolingRequestOutput]:
        inputs = _inputs(prompts)
        if not inputs:
            return []

        async def pool(handle: ModelHandle) -> list[NDArray[np.float32]]:
            return (await pool_inputs(handle, inputs, choose_task(handle.config, task, "pooling_task")))[0]

        return [
            PoolingRequestOutput(str(index), PoolingOutput(array), _given_ids(value))
            for index, (array, value) in enumerate(zip(await self._ask(pool), inputs, strict=True))
        ]

    async def score(self, pairs: list[tuple[str, str]]) -> list[ScoringRequestOutput]:
        if not pairs:
            return []
        values, _ = await self._ask(lambda handle: compare_pairs(handle, pairs))
        scores: list[float] = values.astype(float).tolist()
        return [ScoringRequestOutput(str(index), ScoringOutput(score)) for index, score in enumerate(scores)]

    async def _rows(self, prompts: Any, encode: _Encode) -> tuple[list[Any], NDArray[Any]]:
        """Texts, or lists of token ids, and the row that `encode` makes of each."""
        inputs = _inputs(prompts)
        if not inputs:
            return [], np.empty((0, 0))
        rows, _ = await self._ask(lambda handle: encode(handle, inputs))
        return inputs, rows.astype(float)


async def _embed(handle: ModelHandle, inputs: list[Any]) -> tuple[NDArray[Any], int]:
    return await encode_inputs(handle, inputs, EMBEDDING, "embeddings")


def _inputs(prompts: Any) -> list[Any]:
    given = given_prompts(prompts)
    inputs = [list(prompt.prompt) if isinstance(prompt.prompt, tuple) else prompt.prompt for prompt in given]
    if len({type(value) for value in inputs}) > 1:
        raise InvalidArgument("prompts are texts, or lists of token ids, not both at once", field="prompts")
    return inputs


def _given_ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) else None
