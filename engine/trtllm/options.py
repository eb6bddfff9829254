"""The options of a model that TensorRT-LLM runs. Those of our own engine that it has too go by the same names.

Knows names and ranges, not TensorRT-LLM's names for them. None leaves a choice to it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ...core.errors import InvalidArgument
from ..options import AtLeastOne, Bytes, Fraction, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions:
    """Settings of one model. `speculative_config` and `lora_modules` are JSON objects: a decoding type and its fields;
    paths of adapters by their names.

    Raises:
        InvalidArgument: one of these is no such object.
    """

    tokenizer: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    tensor_parallel_size: AtLeastOne = 1
    pipeline_parallel_size: AtLeastOne = 1
    moe_expert_parallel_size: AtLeastOne | None = None
    max_model_len: AtLeastOne | None = None
    max_num_seqs: AtLeastOne = 256
    max_num_batched_tokens: AtLeastOne = 8192
    max_queued_requests: AtLeastOne = 512
    max_queued_tokens: AtLeastOne = 1_048_576
    default_request_timeout: Seconds = 0.0
    chunked_prefill: bool | None = None
    admission: Literal["optimistic", "no_evict"] | None = None
    prefix_caching: bool = True
    block_size: AtLeastOne | None = None
    kv_cache_dtype: Literal["auto", "fp8", "nvfp4"] | None = None
    kv_cache_memory_fraction: Fraction | None = None
    kv_cache_bytes: Bytes | None = None
    kv_cache_tokens: AtLeastOne | None = None
    kv_cache_host_bytes: Bytes | None = None
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    speculative_config: str | None = None
    lora_modules: str | None = None
    max_lora_rank: AtLeastOne | None = None
    max_loras: AtLeastOne | None = None
    sampler_type: Literal["auto", "TorchSampler", "TRTLLMSampler"] | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

    def __post_init__(self) -> None:
        # Errors are told before anything is loaded.
        _ = self.adapters, self.speculation

    @property
    def adapters(self) -> dict[str, str]:
        """Paths of LoRA adapters by name."""
        return _decoded(self.lora_modules, dict[str, str], "lora_modules", "a JSON object of names and paths")

    @property
    def speculation(self) -> dict[str, Any]:
        """A decoding type, and the fields of its class; empty is none."""
        return _decoded(self.speculative_config, dict[str, Any], "speculative_config", "a JSON object")


def _decoded(text: str | None, kind: type[dict[str, Any]], field: str, form: str) -> dict[str, Any]:
    try:
        return {} if text is None else msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"parameter '{field}' must be {form}: {error}", field=field) from None
