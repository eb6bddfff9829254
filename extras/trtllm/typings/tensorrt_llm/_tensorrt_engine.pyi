import tensorrt_llm

from .llmapi import KvCacheConfig, SchedulerConfig, SpeculativeConfig
from .llmapi.llm_args import LoraConfig

class LLM(tensorrt_llm.LLM):
    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        *,
        kv_cache_config: KvCacheConfig = ...,
        enable_chunked_prefill: bool = False,
        scheduler_config: SchedulerConfig = ...,
        guided_decoding_backend: str | None = None,
        speculative_config: SpeculativeConfig | None = None,
        enable_lora: bool = False,
        lora_config: LoraConfig | None = None,
        max_beam_width: int = ...,
    ) -> None: ...
