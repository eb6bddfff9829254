"""Tables of vLLM's engine arguments: our engine's names, and what becomes of arguments that it does not have. The
command line reads them for vLLM's flags, too."""

from collections.abc import Mapping
from typing import Any

WITHOUT_EFFECT = {
    "enable_chunked_prefill": "prompts are always computed in pieces",
    "scheduling_policy": "a request's priority always counts",
    "enable_auto_tool_choice": "tools may always be called",
    "compilation_config": "nothing is compiled",
    "swap_space": "what has no room is computed again",
    "load_format": "safetensors, else torch's .bin",
    "tokenizer_mode": "a tokenizer.json is read",
    "seed": "a request's seed counts",
    "max_logprobs": "up to 20",
    "generation_config": "the checkpoint's generation_config.json gives the defaults",
    "disable_log_stats": "statistics are metrics, not lines of the log",
}
"""Arguments that change nothing here, with the reason."""

NOT_SERVED: Mapping[str, str] = {
    "cpu_offload_gb": "weights are where they are computed with",
    "kv_offloading_size": "--kv-cache-host-bytes says it in bytes",
    "trust_remote_code": "no code of a checkpoint is run",
    "hf_overrides": "change the checkpoint's config.json",
    "override_generation_config": "change the checkpoint's generation_config.json",
}
"""Arguments for what our engine does not do, with the alternative or the reason."""

ELSEWHERE = {
    "served_model_name": "a model is called as its folder",
    "download_dir": "--download-dir is for all models",
    "hf_token": "the variable HF_TOKEN is for all models",
    "disable_log_requests": "--log-info=false",
    "enable_log_requests": "--log-info is on by default",
    "guided_decoding_backend": "one library holds answers to a form, llguidance",
    "structured_outputs_config": "one library holds answers to a form, llguidance",
    "async_scheduling": "the parameter 'ahead' in config.pbtxt; on a GPU it is 1",
    "otlp_traces_endpoint": "--otlp-traces-endpoint is for all models",
    "generation_config": "parameters that a request leaves out have vLLM's defaults",
    "override_generation_config": "parameters that a request leaves out have vLLM's defaults",
    "max_cpu_loras": "the parameter 'max_lora_bytes' in config.pbtxt",
    "lora_dtype": "adapters are computed with in the model's type",
    "fully_sharded_loras": "ranks hold their slices of an adapter",
}
"""Reasons that replace those of the tables above for arguments in a repository."""

OWN_NAMES: Mapping[str, str] = {
    "tokenizer": "tokenizer",
    "dtype": "dtype",
    "quantization": "quantization",
    "device": "device",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "enable_expert_parallel": "enable_expert_parallel",
    "distributed_executor_backend": "distributed_executor_backend",
    "enforce_eager": "enforce_eager",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "num_gpu_blocks_override": "kv_cache_blocks",
    "enable_prefix_caching": "prefix_caching",
    "speculative_config": "speculative_config",
    "kv_events_config": "kv_events_config",
    "per_request_spec_decode_metrics": "per_request_spec_decode_metrics",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "limit_mm_per_prompt": "limit_mm_per_prompt",
    "mm_processor_kwargs": "mm_processor_kwargs",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
}
"""Arguments that our engine has -> its names."""

OWN_VALUES = {("distributed_executor_backend", "uni"): None}
"""Other values of the arguments above -> ours, beside those that `engine.options` knows."""

CHANGES_ANSWERS = {
    "hf_overrides": NOT_SERVED["hf_overrides"],
    "rope_scaling": NOT_SERVED["hf_overrides"],
    "rope_theta": NOT_SERVED["hf_overrides"],
    "disable_sliding_window": "layers attend as their config.json says",
    "logits_processors": "no code from outside chooses tokens",
    "skip_tokenizer_init": "prompts are text",
    "task": "the model is to generate text",
    "runner": "the model is to generate text",
    "convert": "the model is to generate text",
}
"""Arguments that are refused, since without them the model would answer differently."""

HARMLESS = {"task": {"generate"}, "runner": {"generate"}, "convert": {"none"}, "load_format": {"safetensors", "pt"}}
"""Values of some arguments that change nothing."""

NOTHING = {"", "none", "false", "0", "0.0", "auto", "[]", "{}"}
"""Values, as text, that change nothing."""


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an argument's value changes nothing."""
    text = str(value).lower()
    return text in NOTHING or text in HARMLESS.get(name, ())
