"""From our settings to the arguments of TensorRT-LLM's `LLM`, by version world.

Only what was asked for is passed, and what must be: their defaults are theirs. Makes no `LLM`.
"""

from typing import Any, NamedTuple

from ...core.errors import InvalidArgument, Unsupported
from .lora import lora_requirements
from .model_info import TrtllmModelInfo
from .options import TrtllmOptions
from .package import TrtllmPackage

_CAPACITY = {"optimistic": "MAX_UTILIZATION", "no_evict": "GUARANTEED_NO_EVICT"}

_CACHE = {
    "block_size": "tokens_per_block",
    "kv_cache_dtype": "dtype",
    "kv_cache_memory_fraction": "free_gpu_memory_fraction",
    "kv_cache_bytes": "max_gpu_total_bytes",
    "kv_cache_tokens": "max_tokens",
    "kv_cache_host_bytes": "host_cache_size",
}
_BUILT_IN = ("dtype", "block_size", "kv_cache_dtype", "moe_expert_parallel_size", "sampler_type")
"""Settings that a prebuilt engine fixes, or its runtime does not have."""


class LlmArguments(NamedTuple):
    """A class of the contract, and what it is called with."""

    call: str
    arguments: dict[str, Any]


def llm_arguments(package: TrtllmPackage, checkpoint: TrtllmModelInfo, options: TrtllmOptions) -> LlmArguments:
    """How to make the `LLM`.

    Raises:
        InvalidArgument, Unsupported: a setting is not one that this version or this checkpoint has; it is named.
    """
    shared = _shared(package, checkpoint, options)
    if checkpoint.engine:
        return LlmArguments("EngineLLM", shared | _of_engine(package, options))
    return LlmArguments("LLM", shared | _of_checkpoint(package, checkpoint, options))


def _shared(package: TrtllmPackage, checkpoint: TrtllmModelInfo, options: TrtllmOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": checkpoint.path,
        "tokenizer": options.tokenizer or checkpoint.path,
        "trust_remote_code": options.trust_remote_code,
        "kv_cache_config": _cache(package, options),
    }
    # Without it a prompt longer than a step is refused; not every prebuilt engine can do it.
    chunked = not checkpoint.engine if options.chunked_prefill is None else options.chunked_prefill
    if chunked or options.chunked_prefill is not None:
        arguments["enable_chunked_prefill"] = chunked
    if options.admission is not None:
        policy = _CAPACITY[options.admission]
        arguments["scheduler_config"] = package.make("SchedulerConfig", capacity_scheduler_policy=policy)
    if options.guided_decoding_backend is not None:
        arguments["guided_decoding_backend"] = options.guided_decoding_backend
    if options.speculation:
        arguments["speculative_config"] = _speculation(package, options.speculation)
    return arguments | _lora(package, options)


def _of_checkpoint(package: TrtllmPackage, checkpoint: TrtllmModelInfo, options: TrtllmOptions) -> dict[str, Any]:
    arguments = {
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "max_batch_size": options.max_num_seqs,
        "max_num_tokens": options.max_num_batched_tokens,
        "max_seq_len": checkpoint.max_model_len,
        "stream_interval": options.stream_interval,
        "enable_iter_perf_stats": True,
    }
    for name in ("dtype", "moe_expert_parallel_size", "sampler_type"):
        if getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    if options.sampler_type is not None and "sampler_type" not in package.world.calls["LLM"].arguments:
        raise InvalidArgument(f"sampler_type: tensorrt_llm {package.version} has one sampler", field="sampler_type")
    return arguments


def _of_engine(package: TrtllmPackage, options: TrtllmOptions) -> dict[str, Any]:
    if not package.world.engine_directories:
        raise Unsupported(
            f"this is a prebuilt TensorRT engine, which tensorrt_llm {package.version} no longer loads: serve the "
            "Hugging Face checkpoint, or install a version up to 1.2",
            field="model",
        )
    if options.tokenizer is None:
        raise InvalidArgument("a prebuilt engine has no tokenizer: name its directory or hub id", field="tokenizer")
    for name in _BUILT_IN:
        if getattr(options, name) is not None:
            raise InvalidArgument(f"{name} is fixed in a prebuilt engine", field=name)
    if options.tensor_parallel_size * options.pipeline_parallel_size > 1:
        field = "tensor_parallel_size" if options.tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise InvalidArgument(f"{field}: the ranks of a prebuilt engine were fixed when it was built", field=field)
    return {}


def _cache(package: TrtllmPackage, options: TrtllmOptions) -> Any:
    given = {theirs: getattr(options, ours) for ours, theirs in _CACHE.items() if getattr(options, ours) is not None}
    return package.make("KvCacheConfig", enable_block_reuse=options.prefix_caching, **given)


def _speculation(package: TrtllmPackage, asked: dict[str, Any]) -> Any:
    kinds = package.world.speculation
    kind = asked.get("decoding_type")
    if kind not in kinds:
        known = ", ".join(kinds)
        message = f"speculative_config: decoding_type must be one of {known}, got {kind!r}"
        raise InvalidArgument(message, field="speculative_config")
    given = {name: value for name, value in asked.items() if name != "decoding_type"}
    known_fields = package.world.calls[kinds[kind]].arguments
    for name in given:
        if name not in known_fields:
            message = f"speculative_config: {kind} has no '{name}'; known are {', '.join(known_fields)}"
            raise InvalidArgument(message, field="speculative_config")
    return package.make(kinds[kind], **given)


def _lora(package: TrtllmPackage, options: TrtllmOptions) -> dict[str, Any]:
    if not options.adapters:
        return {}
    needs = lora_requirements(options.adapters)
    config = package.make(
        "LoraConfig",
        lora_target_modules=needs.modules,
        max_lora_rank=options.max_lora_rank or needs.rank,
        max_loras=options.max_loras or len(options.adapters),
    )
    return {"enable_lora": True, "lora_config": config}
