"""The tensors of the model `tensorrt_llm` in Triton's TensorRT-LLM repositories: token ids in, token ids out.

One table says of each field its type, and what a request that sets it gets. Source of names, types and neutral values:
https://github.com/triton-inference-server/tensorrtllm_backend/blob/main/docs/model_config.md.
"""

from enum import StrEnum
from typing import Any, NamedTuple

from ...core.tensor import TensorSpec


class FieldUse(StrEnum):
    """What a field does here: it is served, refused when it asks for something, or has no effect."""

    ON = "on"
    REFUSED = "refused"
    IGNORED = "ignored"


class TokenField(NamedTuple):
    """An input. `neutral`: the values with which a refused one asks for nothing; so does an empty tensor."""

    spec: TensorSpec
    use: FieldUse
    neutral: tuple[Any, ...] = ()


def _spec(text: str, optional: bool) -> TensorSpec:
    """The spec of `name DATATYPE` or `name DATATYPE[dims]`."""
    name, kind = text.split()
    datatype, bracket, dims = kind.partition("[")
    shape = tuple(map(int, dims.rstrip("]").split(","))) if bracket else (1,)
    return TensorSpec(name, datatype, shape, optional)


def _fields(use: FieldUse, *texts: str, neutral: tuple[Any, ...] = (), optional: bool = True) -> list[TokenField]:
    return [TokenField(_spec(text, optional), use, neutral) for text in texts]


_ON = FieldUse.ON
_REFUSED = FieldUse.REFUSED
_IGNORED = FieldUse.IGNORED

FIELDS = {
    field.spec.name: field
    for field in (
        *_fields(_ON, "input_ids INT32[-1]", "input_lengths INT32", "request_output_len INT32", optional=False),
        *_fields(_ON, "end_id INT32", "stop_words_list INT32[2,-1]", "bad_words_list INT32[2,-1]", "min_tokens INT32"),
        *_fields(_ON, "num_return_sequences INT32", "streaming BOOL", "stop BOOL", "exclude_input_in_output BOOL"),
        *_fields(_ON, "temperature FP32", "runtime_top_k INT32", "runtime_top_p FP32", "seed UINT64"),
        *_fields(_ON, "repetition_penalty FP32", "presence_penalty FP32", "frequency_penalty FP32"),
        *_fields(_ON, "embedding_bias FP32[-1]", "return_log_probs BOOL", "return_perf_metrics BOOL"),
        *_fields(_ON, "return_num_input_tokens BOOL", "return_num_output_tokens BOOL"),
        *_fields(_ON, "guided_decoding_guide_type BYTES", "guided_decoding_guide BYTES"),
        *_fields(_ON, "lora_task_id UINT64", "lora_weights FP16[-1,-1]", "lora_config INT32[-1,3]"),
        *_fields(_IGNORED, "pad_id INT32", "len_penalty FP32", "early_stopping BOOL"),
        *_fields(
            _IGNORED, "beam_search_diversity_rate FP32", "runtime_top_p_min FP32", "runtime_top_p_reset_ids INT32"
        ),
        *_fields(_IGNORED, "draft_acceptance_threshold FP32", "mrope_position_deltas INT64"),
        *_fields(_IGNORED, "retention_token_range_starts INT32[-1]", "retention_token_range_ends INT32[-1]"),
        *_fields(_IGNORED, "retention_token_range_priorities INT32[-1]"),
        *_fields(_IGNORED, "retention_token_range_durations_ms INT32[-1]", "retention_decode_priority INT32"),
        *_fields(_IGNORED, "retention_decode_duration_ms INT32"),
        *_fields(_REFUSED, "beam_width INT32", neutral=(0, 1)),
        *_fields(_REFUSED, "runtime_top_p_decay FP32", neutral=(0, 1)),
        *_fields(_REFUSED, "return_context_logits BOOL", "return_generation_logits BOOL", neutral=(False,)),
        *_fields(_REFUSED, "decoder_input_ids INT32[-1]", "encoder_input_features FP16[-1,-1]"),
        *_fields(_REFUSED, "decoder_input_lengths INT32", "encoder_output_lengths INT32", neutral=(0,)),
        *_fields(_REFUSED, "draft_input_ids INT32[-1]", "draft_logits FP32[-1,-1]"),
        *_fields(_REFUSED, "lookahead_window_size INT32", "lookahead_ngram_size INT32", neutral=(0,)),
        *_fields(_REFUSED, "lookahead_verification_set_size INT32", "prompt_vocab_size INT32", neutral=(0,)),
        *_fields(_REFUSED, "prompt_embedding_table FP16[-1,-1]"),
        *_fields(_REFUSED, "prompt_table_extra_ids UINT64[-1]", neutral=(0,)),
        *_fields(_REFUSED, "cross_attention_mask BOOL[-1,-1]", "mrope_rotary_cos_sin FP32[-1]"),
        *_fields(_REFUSED, "skip_cross_attn_blocks BOOL[-1]", neutral=(False,)),
        *_fields(_REFUSED, "context_phase_params UINT8[-1]"),
    )
}
"""The inputs by name. What only shapes a refused feature is ignored, and so are hints for the cache: they change no
text."""

OLDER_FIELDS = {field.spec.name: field for field in _fields(_ON, "random_seed UINT64", "min_length INT32")}
"""Inputs of older configs, which newer ones have by another name."""


def find_field(name: str) -> TokenField | None:
    """The input of that name; None for one that Triton's backend does not have either."""
    return FIELDS.get(name) or OLDER_FIELDS.get(name)


OUTPUTS = {
    spec.name: spec
    for spec in (
        *(_spec(text, False) for text in ("output_ids INT32[-1,-1]", "sequence_length INT32[-1]")),
        *(_spec(text, False) for text in ("cum_log_probs FP32[-1]", "output_log_probs FP32[-1,-1]")),
        *(_spec(text, False) for text in ("context_logits FP32[-1,-1]", "generation_logits FP32[-1,-1,-1]")),
        *(_spec(f"{name} INT32", False) for name in ("batch_index", "sequence_index")),
        _spec("context_phase_params UINT8[-1]", False),
        *(_spec(f"{name} INT32", False) for name in ("num_input_tokens", "num_output_tokens")),
        *(
            _spec(f"kv_cache_{name} INT32", False)
            for name in ("alloc_new_blocks", "reused_blocks", "alloc_total_blocks")
        ),
        *(
            _spec(f"{name}_time_ns INT64", False)
            for name in ("arrival", "first_scheduled", "first_token", "last_token")
        ),
        _spec("acceptance_rate FP32", False),
        *(_spec(f"{name} INT32", False) for name in ("total_accepted_draft_tokens", "total_draft_tokens")),
    )
}
"""The outputs by name. Those of features that are refused hold zeros."""
