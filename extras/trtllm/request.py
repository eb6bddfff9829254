"""One request on its way through TensorRT-LLM, from our queue to its last token.

A sampling parameter that TensorRT-LLM would accept and not apply is refused by its name; stop strings stay with us.
TensorRT-LLM changes the one result of a request in place at every step: what is new is copied out.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unavailable
from ...core.logprobs import Logprobs
from ...core.request import FinishReason, GuidedDecoding
from ...core.resolved_sampling import LogitsParams, ResolvedSampling
from ...engine.client.token_stream import TokenStream
from ...engine.core.messages import AddRequest
from ...scheduler.sequence import Sequence as QueuedSequence
from ...scheduler.sequence import SequenceSpec

if TYPE_CHECKING:
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams, LoRARequest, RequestOutput
    from torch import Tensor

log = logging.getLogger(__name__)

_SEEDS = 2**63

_NO_LOGITS_PARAMS = LogitsParams()

_IGNORED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_p")
"""Parameters that the default sampler of the PyTorch backend accepts and does not apply."""

_TRANSLATED = {*_IGNORED, "logit_bias", "min_tokens", "stop_token_ids", "temperature", "top_k", "top_p", "seed"}
_TRANSLATED |= {"choice", "logprobs", "logits"}
"""Parameters of a row that `translate` passes on; any other, also one that is new, is refused by its name."""

_DEFAULTS = {**ResolvedSampling._field_defaults, **LogitsParams._field_defaults}


@dataclass(frozen=True, slots=True)
class SamplingTranslator:
    """Makes the `SamplingParams` of one model's sequences. `version`: of TensorRT-LLM. `applies_all`: its sampler is
    one that ignores nothing. `decode`: the text of token ids."""

    version: str
    vocab_size: int
    applies_all: bool
    decode: Callable[[Sequence[int]], str]

    def translate(self, add: AddRequest) -> "SamplingParams":
        """The `SamplingParams` of one sequence.

        Raises:
            InvalidArgument: the sampler cannot do what is asked; `field` names it.
        """
        from tensorrt_llm import SamplingParams

        spec, sampling = add.spec, add.spec.sampling
        logits = sampling.logits or _NO_LOGITS_PARAMS
        self._check(sampling, logits)
        if spec.cache_hit_threshold:
            raise InvalidArgument("cache_hit_threshold: TensorRT-LLM has nothing like it", field="cache_hit_threshold")
        greedy, held_back = sampling.temperature == 0, logits.min_tokens > 0
        return SamplingParams(
            max_tokens=max(spec.max_tokens, 1),
            # Theirs holds back one end token until `min_tokens`; those that stop beside it, our reader sees.
            min_tokens=logits.min_tokens or None,
            end_id=min(spec.stop_token_ids) if held_back else None,
            ignore_eos=not held_back,
            stop_token_ids=None if held_back else sorted(spec.stop_token_ids) or None,
            include_stop_str_in_output=True,
            # Greedy is the likeliest token: a temperature of 0 stands for none.
            top_k=1 if greedy else sampling.top_k,
            top_p=None if greedy else sampling.top_p,
            temperature=None if greedy else sampling.temperature,
            min_p=None if greedy else sampling.min_p or None,
            # Answers to one prompt that share a seed have random numbers of their own.
            seed=None if greedy else (sampling.seed + sampling.choice) % _SEEDS,
            repetition_penalty=None if logits.repetition_penalty == 1 else logits.repetition_penalty,
            presence_penalty=logits.presence_penalty or None,
            frequency_penalty=logits.frequency_penalty or None,
            embedding_bias=self._bias(logits.logit_bias) if logits.logit_bias else None,
            bad_token_ids=[word[0] for word in logits.bad_words if len(word) == 1] or None,
            bad=[self.decode(word) for word in logits.bad_words if len(word) > 1] or None,
            logprobs=None if sampling.logprobs is None else max(1, sampling.logprobs),  # 0 may stand for none
            guided_decoding=None if add.constraint is None else _guided_decoding(add.constraint),
            detokenize=False,
        )

    def _check(self, sampling: ResolvedSampling, logits: LogitsParams) -> None:
        values = sampling._asdict() | logits._asdict()
        changed = [name for name, value in values.items() if value != _DEFAULTS[name]]
        for name in changed:
            if name in _IGNORED and not self.applies_all:
                raise InvalidArgument(
                    f"{name}: the PyTorch sampler of tensorrt_llm {self.version} does not apply it; load the "
                    "model with sampler_type TRTLLMSampler",
                    field=name,
                )
            if name not in _TRANSLATED:
                raise InvalidArgument(f"{name}: TensorRT-LLM has nothing like it", field=name)
        if logits.min_tokens and any(len(word) > 1 for word in logits.bad_words):
            message = "min_tokens and bad_words of several tokens do not go together in TensorRT-LLM"
            raise InvalidArgument(message, field="min_tokens")

    def _bias(self, bias: Sequence[tuple[int, float]]) -> "Tensor":
        """float32 [vocab], added to the logits."""
        import torch

        added = torch.zeros(self.vocab_size, dtype=torch.float32)
        for token, value in bias:
            added[token] = value
        return added


def _guided_decoding(guided: GuidedDecoding) -> "GuidedDecodingParams":
    from tensorrt_llm.llmapi import GuidedDecodingParams

    if guided.after:
        message = f"{guided.parameter}: TensorRT-LLM takes no constraints behind reasoning, which would have to be off"
        raise InvalidArgument(message, field=guided.parameter)
    match guided.kind:
        case "json":
            return GuidedDecodingParams(json_object=True)
        case "json_schema":
            return GuidedDecodingParams(json=guided.text)
        case "regex":
            return GuidedDecodingParams(regex=guided.text)
        case "ebnf_grammar":
            return GuidedDecodingParams(grammar=guided.text)
        case "structural_tag" | "choice" | "lark":
            message = f"{guided.parameter}: TensorRT-LLM does not take constraints of the kind '{guided.kind}'"
            raise InvalidArgument(message, field=guided.parameter)


_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "timeout": FinishReason.TIMEOUT}


class GenerateArguments(NamedTuple):
    """The arguments of `LLM.generate_async` for one sequence."""

    inputs: list[int]
    sampling_params: "SamplingParams"
    lora_request: "LoRARequest | None"
    cache_salt: str | None


class ResultDelta(NamedTuple):
    """The tokens since the last reading. With `finish_reason` a request that TensorRT-LLM has not ended is aborted."""

    tokens: list[int]
    logprobs: list[Logprobs]
    finish_reason: FinishReason | None


class ResultReader:
    """Reads the one output of a request's `RequestOutput`."""

    def __init__(self, spec: SequenceSpec) -> None:
        self._stop_token_ids = spec.stop_token_ids
        self._min_tokens = 0 if spec.sampling.logits is None else spec.sampling.logits.min_tokens
        self._top = spec.sampling.logprobs
        self._seen = 0

    def read_delta(self, result: "RequestOutput") -> ResultDelta:
        """Raises `CharoniaError` if TensorRT-LLM gave the request up, or says something unexpected."""
        output = result.outputs[0]
        tokens = list(output.token_ids[self._seen :])
        if error := getattr(result, "error", None):  # of a request that was refused late, and did not raise
            raise Internal(f"TensorRT-LLM: {error}")
        reason = _finish_reason(output.finish_reason, result.finished)
        earliest = max(0, self._min_tokens - self._seen)
        stops = (at for at in range(earliest, len(tokens)) if tokens[at] in self._stop_token_ids)
        if (stop := next(stops, None)) is not None:
            tokens, reason = tokens[: stop + 1], FinishReason.STOP
        elif reason is FinishReason.STOP:
            tokens.append(self._hidden_stop_token(output.stop_reason))
        logprobs = [] if self._top is None else self._read_logprobs(output.logprobs or (), tokens)
        self._seen += len(tokens)
        return ResultDelta(tokens, logprobs, reason)

    def _hidden_stop_token(self, stop_reason: object) -> int:
        """The token that ended the text and is not among its tokens: an end token is left out of them."""
        if stop_reason in self._stop_token_ids and isinstance(stop_reason, int):
            return stop_reason
        if self._stop_token_ids:
            return min(self._stop_token_ids)
        raise Internal("TensorRT-LLM stopped a text that nothing was to stop")

    def _read_logprobs(self, logprobs: Sequence[Mapping[int, Any] | float], tokens: Sequence[int]) -> list[Logprobs]:
        places = zip(tokens, logprobs[self._seen : self._seen + len(tokens)], strict=False)
        read = [self._read_logprob(token, likely) for token, likely in places]
        # A stop token that was left out has none.
        return read + [Logprobs(0.0, [], [])] * (len(tokens) - len(read))

    def _read_logprob(self, token: int, likely: Mapping[int, Any] | float) -> Logprobs:
        if not isinstance(likely, Mapping):  # the chosen token's alone
            return Logprobs(float(likely), [], [])
        if token not in likely:
            raise Internal("TensorRT-LLM gave no log-probability for the token that it chose")
        likeliest = sorted(likely.items(), key=lambda item: -item[1].logprob)[: self._top]
        ids = [int(id) for id, _ in likeliest]
        values = [float(entry.logprob) for _, entry in likeliest]
        return Logprobs(float(likely[token].logprob), ids, values)


def _finish_reason(reason: str | None, finished: bool) -> FinishReason | None:
    if reason is None and not finished:
        return None
    if reason == "cancelled":
        raise Unavailable("TensorRT-LLM gave the request up")
    if reason not in _REASONS:
        raise Internal(f"TensorRT-LLM ended the request with '{reason}'")
    return _REASONS[reason]


class TrtllmRequest:
    """One request of the client. It waits in our queue while `task` is None; `task` then carries its results to
    `stream`. `result`: TensorRT-LLM's object, while it works on this. `timer`: ends it at its deadline."""

    def __init__(
        self, spec: SequenceSpec, arguments: GenerateArguments, stream: TokenStream, queued: QueuedSequence
    ) -> None:
        self.spec = spec
        self.arguments = arguments
        self.stream = stream
        self.queued = queued
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.result: RequestOutput | None = None
        self._reader = ResultReader(spec)
        self._began = 0.0

    def begin(self, result: "RequestOutput") -> None:
        """TensorRT-LLM computes it."""
        self.result, self._began = result, time.monotonic()

    def forward_results(self, result: "RequestOutput") -> int:
        """Write what is new into the stream; the number of tokens. Raises as `ResultReader.read_delta` does."""
        delta = self._reader.read_delta(result)
        if not self.stream.started:
            self.stream.start(result.cached_tokens or 0, self._began)
        if delta.tokens:
            self.stream.push(delta.tokens, time.monotonic(), delta.logprobs)
        if delta.finish_reason is not None:
            self._drop_result(result.finished)
            self.stream.finish(delta.finish_reason)
        return len(delta.tokens)

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Where the error is ours, TensorRT-LLM goes on and is aborted."""
        self._drop_result(ended=not isinstance(error, CharoniaError))
        self.stream.fail(error if isinstance(error, CharoniaError) else Internal(f"TensorRT-LLM: {error}"))

    def stop(self) -> None:
        """End all work for the stream, whose reader is gone."""
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self._drop_result(ended=False)

    def _drop_result(self, ended: bool) -> None:
        result, self.result = self.result, None
        if result is None or ended:
            return
        try:
            result.abort()
        except Exception as error:  # it may have ended by now
            log.warning("TensorRT-LLM could not be told to abort: %s", error)
