"""TensorRT-LLM's `LLM`, made from our settings, and the numbers of a model that are needed before that.

Only what was asked for is passed, and what must be: the other defaults are TensorRT-LLM's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import InvalidArgument
from ...tokenization.checkpoint_files import locate_checkpoint, read_json
from .options import TrtllmOptions

if TYPE_CHECKING:
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import SpeculativeConfig
    from tensorrt_llm.llmapi.llm_args import LoraConfig

_CAPACITY_POLICIES = {"optimistic": "MAX_UTILIZATION", "no_evict": "GUARANTEED_NO_EVICT"}

_CACHE_FIELDS = {
    "block_size": "tokens_per_block",
    "kv_cache_dtype": "dtype",
    "kv_cache_memory_fraction": "free_gpu_memory_fraction",
    "kv_cache_bytes": "max_gpu_total_bytes",
    "kv_cache_tokens": "max_tokens",
    "kv_cache_host_bytes": "host_cache_size",
}
_BUILT_IN = ("dtype", "block_size", "kv_cache_dtype", "moe_expert_parallel_size", "sampler_type")
"""Settings that a prebuilt engine fixes, or its runtime does not have."""

_LORA_MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
    "down_proj": "mlp_4h_to_h",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
}
"""Modules by their names in checkpoints -> TensorRT-LLM's names of them."""


class TrtllmModelInfo(NamedTuple):
    """`path`: a directory, or the hub id that its weights are to be fetched from. `max_model_len`: the longest sequence
    it is made for. `max_num_seqs`: sequences that a prebuilt engine has room for; None where that is free to choose."""

    path: str
    vocab_size: int
    max_model_len: int
    engine: bool = False
    max_num_seqs: int | None = None


def read_model_info(model: str, max_model_len: int | None) -> TrtllmModelInfo:
    """Read config.json in a directory or of a hub id; `max_model_len` replaces the model's own.

    Raises:
        InvalidArgument: config.json lacks a number, or less fits an engine than is asked for; `field` names it.
        NotFound: there is no such model.
    """
    if "@" in model and not Path(model).expanduser().is_dir():
        message = (
            f"TensorRT-LLM fetches no revision of a model: fetch {model} first (hf download) and name its directory"
        )
        raise InvalidArgument(message, field="model")
    directory = locate_checkpoint(model)
    if directory.is_file():
        raise InvalidArgument(f"{directory}: TensorRT-LLM reads no model in GGUF; our own engine does", field="model")
    config = read_json(directory / "config.json")
    if "pretrained_config" in config and "build_config" in config:
        return _prebuilt_engine(directory, config, max_model_len)
    text = config.get("text_config", config)  # models that take images have one
    vocab_size = _number(text, "vocab_size", directory)
    length = max_model_len or _number(text, "max_position_embeddings", directory)
    # Of a hub id, only the small files are here.
    path = str(directory) if Path(model).expanduser().is_dir() else model
    return TrtllmModelInfo(path, vocab_size, length)


def _prebuilt_engine(directory: Path, config: dict[str, Any], max_model_len: int | None) -> TrtllmModelInfo:
    built = config["build_config"]
    longest = _number(built, "max_seq_len", directory)
    if max_model_len is not None and max_model_len > longest:
        message = f"max_model_len {max_model_len} is more than the engine was built for: {longest}"
        raise InvalidArgument(message, field="max_model_len")
    vocab_size = _number(config["pretrained_config"], "vocab_size", directory)
    most = _number(built, "max_batch_size", directory)
    return TrtllmModelInfo(str(directory), vocab_size, max_model_len or longest, engine=True, max_num_seqs=most)


def _number(config: Any, name: str, directory: Path) -> int:
    value = config.get(name) if isinstance(config, dict) else None
    if not isinstance(value, int) or value < 1:
        hint = "; set max_model_len" if name == "max_position_embeddings" else ""
        raise InvalidArgument(f"{directory}/config.json has no {name}{hint}", field="model")
    return value


def make_llm(model: TrtllmModelInfo, options: TrtllmOptions) -> "LLM":
    """Load the model; takes minutes. `tensorrt_llm` is imported by now.

    Raises:
        InvalidArgument: a setting is not one that this checkpoint or prebuilt engine has; `field` names it.
        Exception: anything that `LLM` raises.
    """
    if model.engine:
        return _make_engine_llm(model, options)
    from tensorrt_llm import LLM

    names = ("dtype", "moe_expert_parallel_size", "sampler_type")
    return LLM(
        **_shared_arguments(model, options),
        **{name: value for name in names if (value := getattr(options, name)) is not None},
        # A prompt longer than a step would be refused without it.
        enable_chunked_prefill=options.chunked_prefill is not False,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        max_batch_size=options.max_num_seqs,
        max_num_tokens=options.max_num_batched_tokens,
        max_seq_len=model.max_model_len,
        stream_interval=options.stream_interval,
        enable_iter_perf_stats=True,
    )


def _make_engine_llm(model: TrtllmModelInfo, options: TrtllmOptions) -> "LLM":
    from tensorrt_llm import _tensorrt_engine

    if options.tokenizer is None:
        raise InvalidArgument("a prebuilt engine has no tokenizer: name its directory or hub id", field="tokenizer")
    for name in _BUILT_IN:
        if getattr(options, name) is not None:
            raise InvalidArgument(f"{name} is fixed in a prebuilt engine", field=name)
    if options.tensor_parallel_size * options.pipeline_parallel_size > 1:
        field = "tensor_parallel_size" if options.tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise InvalidArgument(f"{field}: the ranks of a prebuilt engine were fixed when it was built", field=field)
    arguments = _shared_arguments(model, options)
    if options.chunked_prefill is not None:  # not every prebuilt engine can do it
        arguments["enable_chunked_prefill"] = options.chunked_prefill
    return _tensorrt_engine.LLM(**arguments)


def _shared_arguments(model: TrtllmModelInfo, options: TrtllmOptions) -> dict[str, Any]:
    from tensorrt_llm.llmapi import KvCacheConfig

    cache = {theirs: value for ours, theirs in _CACHE_FIELDS.items() if (value := getattr(options, ours)) is not None}
    arguments: dict[str, Any] = {
        "model": model.path,
        "tokenizer": options.tokenizer or model.path,
        "trust_remote_code": options.trust_remote_code,
        "kv_cache_config": KvCacheConfig(enable_block_reuse=options.prefix_caching, **cache),
    }
    if options.admission is not None:
        from tensorrt_llm.llmapi import SchedulerConfig

        policy = _CAPACITY_POLICIES[options.admission]
        arguments["scheduler_config"] = SchedulerConfig(capacity_scheduler_policy=policy)
    if options.guided_decoding_backend is not None:
        arguments["guided_decoding_backend"] = options.guided_decoding_backend
    if options.speculation:
        arguments["speculative_config"] = _speculative_config(options.speculation)
    if options.adapters:
        arguments |= {"enable_lora": True, "lora_config": _lora_config(options)}
    return arguments


def _speculative_config(speculation: Mapping[str, Any]) -> "SpeculativeConfig":
    import inspect

    from tensorrt_llm import llmapi

    kinds: dict[str, type[SpeculativeConfig]] = {
        "NGram": llmapi.NGramDecodingConfig,
        "Draft_Target": llmapi.DraftTargetDecodingConfig,
        "MTP": llmapi.MTPDecodingConfig,
        "Eagle": llmapi.EagleDecodingConfig,
        "Lookahead": llmapi.LookaheadDecodingConfig,
    }
    fields = dict(speculation)
    kind = fields.pop("decoding_type", None)
    if kind not in kinds:
        message = f"speculative_config: decoding_type must be one of {', '.join(kinds)}, got {kind!r}"
        raise InvalidArgument(message, field="speculative_config")
    known = inspect.signature(kinds[kind]).parameters
    for name in fields:
        if name not in known:
            message = f"speculative_config: {kind} has no '{name}'; known are {', '.join(known)}"
            raise InvalidArgument(message, field="speculative_config")
    return kinds[kind](**fields)


def _lora_config(options: TrtllmOptions) -> "LoraConfig":
    """Room for all adapters: the modules that they change, by TensorRT-LLM's names, and the largest of their ranks.

    Reads each adapter's adapter_config.json, PEFT's, and no weights.
    """
    from tensorrt_llm.llmapi.llm_args import LoraConfig

    modules: list[str] = []
    ranks: list[int] = []
    for name, path in options.adapters.items():
        config = read_json(Path(path) / "adapter_config.json")
        if not config:
            raise _bad_adapter(f"{path} of '{name}' has no adapter_config.json")
        targets = config.get("target_modules")
        rank = config.get("r")
        if not isinstance(targets, list) or not targets:
            raise _bad_adapter(f"adapter '{name}' must list its target_modules, got {targets!r}")
        names = [str(target).rpartition(".")[2] for target in targets]
        if unknown := [name for name in names if name not in _LORA_MODULES]:
            raise _bad_adapter(f"adapter '{name}' changes {', '.join(unknown)}, which TensorRT-LLM cannot")
        if not isinstance(rank, int) or rank < 1:
            raise _bad_adapter(f"adapter '{name}' has no rank (r)")
        modules += (_LORA_MODULES[name] for name in names)
        ranks.append(rank)
    return LoraConfig(
        lora_target_modules=list(dict.fromkeys(modules)),
        max_lora_rank=options.max_lora_rank or max(ranks),
        max_loras=options.max_loras or len(ranks),
    )


def _bad_adapter(message: str) -> InvalidArgument:
    return InvalidArgument(f"lora_modules: {message}", field="lora_modules")
