"""The part of TensorRT-LLM 1.1 and 1.2 that `extras/trtllm` uses, after its API reference
(https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html).

`make lint` checks every call against these stubs. They ship with the package: when a model loads, and for
`charonia check --tensorrt-llm`, they are compared with the installed one. A default of `...` is not relied on.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from .llmapi import GuidedDecodingParams, KvCacheConfig, LoRARequest, RequestOutput, SchedulerConfig, SpeculativeConfig
from .llmapi.llm_args import LoraConfig

__version__: str

class _Tokenizer(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...

class SamplingParams:
    def __init__(
        self,
        *,
        max_tokens: int = 32,
        min_tokens: int | None = None,
        end_id: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: list[int] | None = None,
        include_stop_str_in_output: bool = False,
        bad: list[str] | None = None,
        bad_token_ids: list[int] | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        embedding_bias: Tensor | None = None,
        logprobs: int | None = None,
        guided_decoding: GuidedDecodingParams | None = None,
        detokenize: bool = True,
        n: int = 1,
        best_of: int | None = None,
    ) -> None: ...

class LLM:
    tokenizer: _Tokenizer
    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        *,
        pipeline_parallel_size: int = 1,
        moe_expert_parallel_size: int | None = None,
        max_batch_size: int = ...,
        max_num_tokens: int = 8192,
        max_seq_len: int | None = None,
        max_beam_width: int = ...,
        kv_cache_config: KvCacheConfig = ...,
        enable_chunked_prefill: bool = False,
        scheduler_config: SchedulerConfig = ...,
        stream_interval: int = 1,
        enable_lora: bool = False,
        lora_config: LoraConfig | None = None,
        guided_decoding_backend: str | None = None,
        speculative_config: SpeculativeConfig | None = None,
        enable_iter_perf_stats: bool = False,
        sampler_type: str = "auto",
    ) -> None: ...
    def generate_async(
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
        cache_salt: str | None = None,
    ) -> RequestOutput: ...
    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[str | bytes | dict[str, Any]]: ...
    def shutdown(self) -> None: ...
