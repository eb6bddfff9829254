from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, TypeAlias

class RequestError(RuntimeError): ...

class _Logprob(Protocol):
    logprob: float
    rank: int | None

class CompletionOutput:
    token_ids: list[int]
    logprobs: Sequence[Mapping[int, _Logprob] | float] | None
    finish_reason: str | None
    stop_reason: int | str | None

class RequestOutput:
    outputs: list[CompletionOutput]
    finished: bool
    cached_tokens: int | None
    def abort(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

class GuidedDecodingParams:
    def __init__(
        self,
        *,
        json: str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        json_object: bool = False,
    ) -> None: ...

class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str = "") -> None: ...

class KvCacheConfig:
    def __init__(
        self,
        *,
        enable_block_reuse: bool = True,
        free_gpu_memory_fraction: float | None = ...,
        max_tokens: int | None = None,
        max_gpu_total_bytes: int | None = ...,
        tokens_per_block: int = 32,
        dtype: str = "auto",
        host_cache_size: int | None = None,
    ) -> None: ...

class SchedulerConfig:
    def __init__(self, *, capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT") -> None: ...

class NGramDecodingConfig:
    def __init__(
        self,
        *,
        max_draft_len: int | None = None,
        max_concurrency: int | None = None,
        max_matching_ngram_size: int = ...,
        is_keep_all: bool = True,
        is_use_oldest: bool = True,
        is_public_pool: bool = True,
    ) -> None: ...

class DraftTargetDecodingConfig:
    def __init__(
        self,
        *,
        max_draft_len: int | None = None,
        max_concurrency: int | None = None,
        speculative_model_dir: str | None = None,
    ) -> None: ...

class MTPDecodingConfig:
    def __init__(
        self,
        *,
        num_nextn_predict_layers: int = 1,
        use_relaxed_acceptance_for_thinking: bool = False,
        relaxed_topk: int = 1,
        relaxed_delta: float = 0.0,
        max_concurrency: int | None = None,
    ) -> None: ...

class EagleDecodingConfig:
    def __init__(
        self,
        *,
        max_draft_len: int | None = None,
        max_concurrency: int | None = None,
        speculative_model_dir: str | None = None,
        eagle3_one_model: bool = True,
    ) -> None: ...

class LookaheadDecodingConfig:
    def __init__(
        self, *, max_window_size: int = ..., max_ngram_size: int = ..., max_verification_set_size: int = ...
    ) -> None: ...

SpeculativeConfig: TypeAlias = (
    NGramDecodingConfig | DraftTargetDecodingConfig | MTPDecodingConfig | EagleDecodingConfig | LookaheadDecodingConfig
)
