"""The answers of the model `tensorrt_llm`: the tokens of generations as tensors, and the numbers beside them.

Knows nothing of requests but what ends a text.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.request import GenerateChunk
from ...core.request_context import SequenceRecord
from ...core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from .token_fields import OUTPUTS


class TokenAnswer(NamedTuple):
    """A part of an answer, or all of it. `tokens`: those that are shown; `log_probs`: of the generated ones among them;
    `log_prob`: the sum of all so far. `row`: of the batch; `sequence`: which of the row's
    answers. `block_size`: of the cache."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    log_prob: float
    chunk: GenerateChunk
    record: SequenceRecord
    block_size: int
    row: int = 0
    sequence: int = 0

    @property
    def blocks(self) -> int:
        """The blocks of the cache that its tokens fill."""
        usage = self.chunk.usage
        return -(-(usage.prompt_tokens + usage.completion_tokens) // self.block_size)

    @property
    def reused_blocks(self) -> int:
        return self.chunk.usage.cached_tokens // self.block_size


class TokenReader:
    """Takes the chunks of one generation. The token by which the model ended it is not shown; stop words are."""

    def __init__(self, record: SequenceRecord, block_size: int, row: int = 0, sequence: int = 0) -> None:
        self._of = record, block_size, row, sequence
        self._log_prob = 0.0

    def read(self, chunk: GenerateChunk, prompt: tuple[int, ...] = ()) -> TokenAnswer:
        """The part of the answer that is in a chunk; `prompt` is shown before it."""
        tokens = chunk.token_ids[:-1] if chunk.end_token else chunk.token_ids
        log_probs = [each.logprob for each in chunk.logprobs[: len(tokens)]] or [0.0] * len(tokens)
        self._log_prob += sum(log_probs)
        return TokenAnswer(prompt + tokens, log_probs, self._log_prob, chunk, *self._of)


def _time(seconds: float | None) -> list[int]:
    return [int((seconds or 0.0) * 1e9)]


_ALWAYS_ZERO = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
_ZEROS = {*_ALWAYS_ZERO, "context_logits", "generation_logits", "context_phase_params"}
_VALUES: Mapping[str, Callable[[Sequence[TokenAnswer]], Sequence[Any]]] = {
    "output_ids": lambda row: [answer.tokens for answer in row],
    "sequence_length": lambda row: [len(answer.tokens) for answer in row],
    "cum_log_probs": lambda row: [answer.log_prob for answer in row],
    "output_log_probs": lambda row: [answer.log_probs for answer in row],
    "context_logits": lambda _: [[0.0]],
    "generation_logits": lambda _: [[[0.0]]],
    "batch_index": lambda row: [row[0].row],
    "sequence_index": lambda row: [row[0].sequence],
    "context_phase_params": lambda _: [],
    "num_input_tokens": lambda row: [row[0].chunk.usage.prompt_tokens],
    "num_output_tokens": lambda row: [sum(len(answer.log_probs) for answer in row)],
    "kv_cache_alloc_total_blocks": lambda row: [row[0].blocks],
    "kv_cache_reused_blocks": lambda row: [row[0].reused_blocks],
    "kv_cache_alloc_new_blocks": lambda row: [row[0].blocks - row[0].reused_blocks],
    "arrival_time_ns": lambda row: _time(row[0].record.opened),
    "first_scheduled_time_ns": lambda row: _time(row[0].record.begun),
    "first_token_time_ns": lambda row: _time(row[0].record.first),
    "last_token_time_ns": lambda row: _time(row[0].record.last),
    **dict.fromkeys(_ALWAYS_ZERO, lambda _: [0]),
}
"""The elements of an output for one row of the batch, from its answers. Times are of the server's monotonic clock."""

_MEASURED = frozenset(name for name in OUTPUTS if name.startswith(("kv_cache", "acceptance", "total_")))
_MEASURED |= {name for name in OUTPUTS if name.endswith("_time_ns")}
RETURNED_OUTPUTS: Mapping[str, Collection[str]] = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_perf_metrics": _MEASURED,
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
}
"""The outputs that an input asks for, where a request names none."""


def output_tensor(spec: TensorSpec, rows: Sequence[Sequence[TokenAnswer]], batched: bool) -> Tensor:
    """One output for all rows of a batch; without a batch dimension for the only row."""
    if spec.name in _ZEROS and len(rows) == 1:
        return _zeros(spec, batched)
    return _make_tensor(spec, [_VALUES[spec.name](row) for row in rows], batched)


@cache
def _zeros(spec: TensorSpec, batched: bool) -> Tensor:
    """Ensembles ask for all outputs with every token: those that are always the same are made once."""
    tensor = _make_tensor(spec, [_VALUES[spec.name](())], batched)
    tensor.data.flags.writeable = False
    return tensor


def _make_tensor(spec: TensorSpec, rows: Sequence[Any], batched: bool) -> Tensor:
    data = _stacked(rows, spec)
    data = data if batched else data[0]
    return Tensor(spec.name, spec.datatype, data.shape, data)


def _stacked(rows: Sequence[Any], spec: TensorSpec) -> NDArray[Any]:
    """The elements of all rows, the last dimension padded with 0 to the longest."""
    dtype = NUMPY_TYPES[spec.datatype]
    if not (rows[0] and isinstance(rows[0][0], list | tuple)):
        return np.array(rows, dtype)
    width = max(len(each) for row in rows for each in row)
    return np.array([[[*each, *[0] * (width - len(each))] for each in row] for row in rows], dtype)
