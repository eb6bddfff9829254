"""Dynamo's requests, which its frontend has tokenized, become the engine's, and answers become its chunks.

Knows nothing of ai-dynamo: the fields are those of its `PreprocessedRequest` and `LLMEngineOutput`, as JSON has them.
"""

import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from ...core.errors import InvalidArgument, describe_validation_error
from ...core.kv_transfer import FIELD, KVTransferParams, parse_kv_transfer
from ...core.logprobs import LikelyToken
from ...core.request import FinishReason, GenerateChunk, GenerateRequest
from ...core.sampling import SamplingParams
from ...core.structured_outputs import only_constraint, parse_structured_outputs

Role: TypeAlias = Literal["agg", "prefill", "decode"]
"""What a worker does: whole requests, prompts for others, or answers to what others have computed."""
Fields: TypeAlias = Mapping[str, Any]

PROBE = "_HEALTH_CHECK"
"""A key of the requests by which the runtime finds out whether a worker works."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids",
)  # fmt: skip
_UNSERVED = ("multi_modal_data", "prompt_embeds", "encoder_result")
_REASONS = {FinishReason.TIMEOUT: "error: the request's time is up", FinishReason.ABORT: "cancelled"}
"""Dynamo's words where they are others."""


def read_request(fields: Fields, request_id: str, role: Role, adapters: Collection[str] = ()) -> GenerateRequest:
    """The request that a worker of that role makes of Dynamo's.

    Raises:
        InvalidArgument: a field is wrong, or wants what is not served.
    """
    for name in _UNSERVED:
        if fields.get(name):
            raise InvalidArgument(f"{name} is not served: prompts are token ids alone", field=name)
    names = ("sampling_options", "stop_conditions", "output_options", "routing")
    sampling, stop, output, routing = (fields.get(name) or {} for name in names)
    for name in ("n", "best_of", "use_beam_search"):
        if (sampling.get(name) or 1) > 1 or sampling.get(name) is True:
            raise InvalidArgument(f"{name} is not served: Dynamo's contract has one answer to a request", field=name)
    budget = stop.get("max_thinking_tokens")
    asked = routing.get("lora_name") or fields.get("model") or ""
    return GenerateRequest(
        id=request_id,
        prompt=_token_ids(fields.get("token_ids")),
        sampling=_sampling(sampling, stop, output, role == "prefill"),
        priority=max(0, -(routing.get("priority") or 0)),  # theirs is the higher the more urgent
        adapter=asked if asked in adapters else "",
        cache_salt=routing.get("cache_salt") or "",
        guided_decoding=_constraint(sampling.get("guided_decoding")),
        reads_answer=bool(fields.get("require_reasoning")) or budget is not None,
        thinking_budget=budget,
        bad_word_ids=tuple(tuple(word) for word in sampling.get("bad_words_token_ids") or ()),
        kv_transfer=None if fields.get(PROBE) is True else _transfer(fields, role),
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    """A list, or bytes of little-endian int32."""
    if isinstance(value, bytes | bytearray | memoryview):
        ids = array("i", bytes(value))
        if sys.byteorder == "big":
            ids.byteswap()
        return tuple(ids)
    return tuple(value or ())


def _sampling(sampling: Fields, stop: Fields, output: Fields, prompt_only: bool) -> SamplingParams:
    """Stop strings are not among them: the frontend, which has the text, looks for those, and cancels."""
    given = {name: sampling.get(name) for name in _SAMPLING}
    given |= {name: output.get(name) for name in ("logprobs", "prompt_logprobs")}
    if prompt_only:  # an end is for the worker to find that answers: here it would leave what is held to nobody
        ends: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True}
    else:
        given |= {name: stop.get(name) for name in ("min_tokens", "ignore_eos")}
        listed = [*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())]
        ends = {"max_tokens": stop.get("max_tokens"), "stop_token_ids": list(dict.fromkeys(listed))}
    chosen = {name: value for name, value in given.items() if value not in (None, "")} | ends
    try:
        return msgspec.convert(chosen, SamplingParams)
    except msgspec.ValidationError as error:
        mismatch = describe_validation_error(error)
        raise InvalidArgument(f"{mismatch.path} {mismatch}", field=mismatch.path or None) from None


def _constraint(guided: Fields | None) -> Any:
    if not guided:
        return None
    fields = {name: value for name, value in guided.items() if value is not None}
    return only_constraint(parse_structured_outputs(fields, "guided_decoding"))


def _transfer(fields: Fields, role: Role) -> KVTransferParams | None:
    if role == "prefill":
        return KVTransferParams(do_remote_decode=True)
    computed = (fields.get("prefill_result") or {}).get("disaggregated_params") or {}
    return parse_kv_transfer(computed.get(FIELD) or {}) if role == "decode" else None


def chunk_fields(chunk: GenerateChunk) -> dict[str, Any]:
    """A chunk as Dynamo has it. It decodes token ids itself; the one that ended the text is among them."""
    fields: dict[str, Any] = {"token_ids": list(chunk.token_ids), "index": 0}
    if chunk.logprobs:
        fields["log_probs"] = [token.logprob for token in chunk.logprobs]
        if any(token.top for token in chunk.logprobs):
            fields["top_logprobs"] = [_top(token.top) for token in chunk.logprobs]
    if chunk.prompt_logprobs:
        prompt = [None if token.given is None else token.given.by_id(token.rank) for token in chunk.prompt_logprobs]
        fields["engine_data"] = {"prompt_logprobs": prompt}
    if chunk.kv_transfer_params is not None:
        fields["disaggregated_params"] = {FIELD: dict(chunk.kv_transfer_params)}
    if chunk.finish_reason is not None:
        usage = chunk.usage
        fields["finish_reason"] = _REASONS.get(chunk.finish_reason, chunk.finish_reason.value)
        fields["completion_usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
    return fields


def _top(tokens: Sequence[LikelyToken]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "token_id": token.id, "token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
        for rank, token in enumerate(tokens, 1)
    ]
