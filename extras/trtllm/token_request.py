"""The requests of the model `tensorrt_llm`: tensors of token ids become generations.

Sampling follows TensorRT-LLM: what a request leaves out is neutral, whatever the checkpoint's generation_config says,
and without temperature, top_k and top_p a text is greedy.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.adapter import LoraTask
from ...core.errors import InvalidArgument
from ...core.request import GenerateRequest, InferRequest
from ...core.sampling import SamplingParams, TokenLimit
from ...core.tensor import Tensor
from ...engine.client.request_parameters import one_element, parse_request_parameters, text_of
from .cancellation import request_id
from .token_fields import FieldUse, find_field

_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_EXCLUDED = "exclude_input_in_output"
_APART = {"input_ids", "input_lengths", "stop_words_list", "bad_words_list", "embedding_bias", "end_id", "stop"}
_APART |= {_EXCLUDED, "return_perf_metrics", "lora_task_id", "lora_weights", "lora_config"}
"""Inputs that are served and are no parameters of their names."""


class TokenQuestion(NamedTuple):
    """A request, parsed. `rows`: of its batch, each with its answers' requests. `excluded`: a whole answer begins
    without the prompt, None if the request does not say. `flags`: the inputs that are true. `ignored`: parameters that
    nobody knows."""

    rows: Sequence[Sequence[GenerateRequest]]
    streaming: bool
    excluded: bool | None
    flags: Set[str]
    ignored: Sequence[str]

    @property
    def requests(self) -> Sequence[GenerateRequest]:
        """The requests of all rows."""
        return [request for row in self.rows for request in row]


def parse_token_request(request: InferRequest, batched: bool, limit: TokenLimit) -> TokenQuestion:
    """Parse a request; its tensors have a batch dimension if `batched`. `limit`: of a prompt's tokens.

    Raises:
        InvalidArgument: a value is wrong, or asks for what is not served; `field` names it.
    """
    _refuse_unsupported(request.inputs)
    size = request.inputs["input_ids"].shape[0] if batched else 1
    arrays = {name: tensor.data.reshape(size, -1) for name, tensor in request.inputs.items() if tensor.data.size}
    ignored = list[str]()
    parsed = [
        _parse_row(request, {name: array[row] for name, array in arrays.items()}, limit, ignored if row == 0 else [])
        for row in range(size)
    ]
    rows = [row for row, _ in parsed]
    streaming = parsed[0][1]
    if any(len(row) != len(rows[0]) for row in rows):
        message = "num_return_sequences must be the same in all rows of a batch"
        raise InvalidArgument(message, field="num_return_sequences")
    excluded = bool(arrays[_EXCLUDED].any()) if _EXCLUDED in arrays else None
    flags = {name for name, array in arrays.items() if array.dtype == np.bool_ and array.any()}
    return TokenQuestion(rows, streaming, excluded, flags, ignored)


def _refuse_unsupported(inputs: Mapping[str, Tensor]) -> None:
    for name, tensor in inputs.items():
        field = find_field(name)
        if field is None:
            asks = any(tensor.data.flat)
        elif field.use is FieldUse.REFUSED:
            asks = bool(tensor.data.size) and not (field.neutral and np.isin(tensor.data, field.neutral).all())
        else:
            asks = False
        if asks:
            raise InvalidArgument(f"input '{name}' is not supported by this model", field=name)


def _parse_row(
    request: InferRequest, values: Mapping[str, NDArray[Any]], limit: TokenLimit, ignored: list[str]
) -> tuple[list[GenerateRequest], bool]:
    """The requests for one row of the batch, and whether they stream. `ignored` gets the names that nobody knows."""
    sampling, options = parse_request_parameters(request.parameters, None, _parameters(values), ignored=ignored)
    if options.return_log_probs:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    generate = GenerateRequest(
        id=request_id(request),
        prompt=_prompt(values, limit),
        sampling=_with_neutral(sampling),
        priority=options.priority,
        cache_salt=options.cache_salt,
        timeout=options.timeout / 1e6,
        choice_count=options.n,
        adapter=options.lora_name,
        lora_task=_lora_task(values),
        guided_decoding=options.constraint,
        drafts=options.drafts,
        bad_word_ids=_words("bad_words_list", values),
        stop_word_ids=_words("stop_words_list", values),
    )
    return [msgspec.structs.replace(generate, choice=choice) for choice in range(options.n)], options.stream


def _parameters(values: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The inputs that are parameters, as `parse_request_parameters` takes them."""
    parameters: dict[str, Any] = {}
    for name, array in values.items():
        field = find_field(name)
        if field is None or field.use is not FieldUse.ON or name in _APART:
            continue
        tensor = Tensor(name, field.spec.datatype, array.shape, array)
        parameters[name] = text_of(tensor) if tensor.datatype == "BYTES" else one_element(tensor)
    for name in ("guided_decoding_guide_type", "guided_decoding_guide"):
        if not parameters.get(name, True):
            del parameters[name]
    if parameters.get("runtime_top_p") == 0:  # off, as is 0 for top_k
        del parameters["runtime_top_p"]
    if "end_id" in values:
        parameters |= {"ignore_eos": True} if values["end_id"][0] == -1 else {"end_id": int(values["end_id"][0])}
    biased = np.flatnonzero(values.get("embedding_bias", ()))
    if biased.size:
        parameters["embedding_bias"] = {int(token): float(values["embedding_bias"][token]) for token in biased}
    return parameters


def _with_neutral(sampling: SamplingParams) -> SamplingParams:
    """The parameters as TensorRT-LLM completes them."""
    chosen = sampling.temperature is not None or sampling.top_p is not None or (sampling.top_k or 0) > 0
    neutral = _NEUTRAL if chosen else _NEUTRAL | {"temperature": 0.0}
    missing = {name: value for name, value in neutral.items() if getattr(sampling, name) is None}
    return msgspec.structs.replace(sampling, **missing)


def _prompt(values: Mapping[str, NDArray[Any]], limit: TokenLimit) -> tuple[int, ...]:
    ids = values.get("input_ids", np.empty(0, np.int32))
    length = int(values["input_lengths"][0])
    if not 1 <= length <= ids.size:
        message = f"input_lengths must be between 1 and the {ids.size} of input_ids, got {length}"
        raise InvalidArgument(message, field="input_lengths")
    if length > limit.tokens:
        raise limit.error(f"input_ids are {length}", "input_ids")
    return tuple(ids[:length].tolist())


def _lora_task(values: Mapping[str, NDArray[Any]]) -> LoraTask | None:
    """The adapter that a request names by its number; 0 without weights is none."""
    weights = values.get("lora_weights")
    config = values.get("lora_config")
    sent = weights is not None or config is not None
    if sent and "lora_task_id" not in values:
        raise InvalidArgument("lora_weights and lora_config need a lora_task_id", field="lora_task_id")
    number = int(values["lora_task_id"][0]) if "lora_task_id" in values else 0
    return LoraTask(number, weights, config) if number or sent else None


def _words(name: str, values: Mapping[str, NDArray[Any]]) -> tuple[tuple[int, ...], ...]:
    """Words as TensorRT-LLM encodes them: a row of all their tokens, and one of their ends in it, -1 after the last."""
    if name not in values:
        return ()
    tokens, ends = values[name].reshape(2, -1).tolist()
    words = []
    begin = 0
    for end in ends:
        if end < 0:
            break
        if not begin < end <= len(tokens):
            message = f"{name}: the ends of words must rise up to {len(tokens)}, got {end} after {begin}"
            raise InvalidArgument(message, field=name)
        words.append(tuple(tokens[begin:end]))
        begin = end
    return tuple(words)
