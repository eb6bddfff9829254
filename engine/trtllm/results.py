"""What TensorRT-LLM says of a request: one object, changed in place at every step, read here as what is new.

Knows nothing of queues. Token ids and log-probabilities are copied out; their text is not looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.errors import CharoniaError, Internal, Unavailable
from ...core.logprobs import Logprobs
from ...core.request import FinishReason
from ..core.messages import AddRequest

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "timeout": FinishReason.TIMEOUT}


class ResultDelta(NamedTuple):
    """Since the last look. `finish_reason` may come before TensorRT-LLM's own end, which then has to be told."""

    tokens: list[int]
    logprobs: list[Logprobs]
    finish_reason: FinishReason | None


class ResultReader:
    """Reads the one output of a request's `RequestOutput`."""

    def __init__(self, add: AddRequest) -> None:
        self._stops = frozenset(add.stop_token_ids)
        self._min_tokens = 0 if add.sampling.logits is None else add.sampling.logits.min_tokens
        self._top = add.sampling.logprobs
        self._seen = 0

    def read_delta(self, result: Any) -> ResultDelta:
        """Raises `CharoniaError` if TensorRT-LLM gave the request up, or says what nobody expects."""
        output = result.outputs[0]
        tokens = list(output.token_ids[self._seen :])
        if said := getattr(result, "error", None):  # newer versions do not raise it
            raise Internal(f"TensorRT-LLM: {said}")
        reason = _reason(output.finish_reason, result.finished)
        if (stop := self._stop(tokens)) is not None:
            tokens, reason = tokens[: stop + 1], FinishReason.STOP
        elif reason is FinishReason.STOP:
            tokens.append(self._stopped_by(output.stop_reason))
        logprobs = self._logprobs(output.logprobs, tokens)
        self._seen += len(tokens)
        return ResultDelta(tokens, logprobs, reason)

    def _stop(self, tokens: Sequence[int]) -> int | None:
        """The place of the first token that ends the text."""
        places = range(max(0, self._min_tokens - self._seen), len(tokens))
        return next((place for place in places if tokens[place] in self._stops), None)

    def _stopped_by(self, said: Any) -> int:
        """The token that ended it and is not among its tokens: some versions leave an end token out."""
        if said in self._stops:
            return int(said)
        if self._stops:
            return min(self._stops)
        raise Internal("TensorRT-LLM stopped a text that nothing was to stop")

    def _logprobs(self, given: Sequence[Any], tokens: Sequence[int]) -> list[Logprobs]:
        if self._top is None:
            return []
        places = zip(tokens, given[self._seen : self._seen + len(tokens)], strict=False)
        found = [self._logprob(token, each) for token, each in places]
        # A stop token that was left out has none.
        return found + [Logprobs(0.0, [], [])] * (len(tokens) - len(found))

    def _logprob(self, token: int, given: Mapping[int, Any] | float) -> Logprobs:
        if not isinstance(given, Mapping):  # the chosen token's alone
            return Logprobs(float(given), [], [])
        if token not in given:
            raise Internal("TensorRT-LLM gave no log-probability for the token that it chose")
        likeliest = sorted(given.items(), key=lambda item: -item[1].logprob)[: self._top]
        ids, values = [int(id) for id, _ in likeliest], [float(each.logprob) for _, each in likeliest]
        return Logprobs(float(given[token].logprob), ids, values)


def _reason(said: str | None, finished: bool) -> FinishReason | None:
    if said is None and not finished:
        return None
    if said == "cancelled":
        raise Unavailable("TensorRT-LLM gave the request up")
    if said not in _REASONS:
        raise Internal(f"TensorRT-LLM ended the request with '{said}'")
    return _REASONS[said]


def to_client_error(error: Exception) -> CharoniaError:
    """What a request's client is told of an error out of TensorRT-LLM."""
    return error if isinstance(error, CharoniaError) else Internal(f"TensorRT-LLM: {error}")
