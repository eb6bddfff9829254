"""The options of an engine, by the same names as config.pbtxt parameters and as command-line flags.

Knows their names and ranges, not their effect. None leaves a choice to the engine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from ..core.drafts import DraftReport
from ..core.errors import InvalidArgument, describe_validation_error, did_you_mean
from ..scheduler.config import SchedulerConfig
from .config import (
    SPECULATION_METHODS,
    CacheConfig,
    EngineConfig,
    FakeConfig,
    LoraConfig,
    ParallelConfig,
    Quantization,
    SpeculationConfig,
)
from .kv_events_options import read_kv_events_config
from .media_options import MEDIA_FIELDS, read_media_config
from .option_values import plain_count, plain_value, takes_count
from .transfer_config import read_kv_transfer_config

T = TypeVar("T")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=3600)]
ReplicaCount: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=128)]
RankCount: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=128)]
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=3_600_000)]
Layers: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,6}(,[0-9]{1,6})*$")]
Fraction: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of an LLM's engine."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    """Type of weights and cache."""
    device: str | None = None
    """Where it computes: auto, cpu, cuda, ..."""
    quantization: Quantization | None = None
    """int8, int4: make matrices integers while they are loaded: half, or a third, of the memory. fp8: on a GPU, floats
    of eight bits. Others, and fp8 beside such weights: what the checkpoint is stored as already."""
    cache_dir: str | None = None
    """Keep packed weights and a GPU's compiled kernels in this directory, so that the next start need not make them
    again; unset: keep no weights."""
    cache_max_bytes: Bytes | None = None
    """Bytes that all packed weights in it may have; the oldest make room."""
    cpu_level: (
        Literal["auto", "portable", "avx2", "avx512core", "avx512", "avx512bf16", "amx", "dotprod", "i8mm", "bfmmla"]
        | None
    ) = None
    """Instructions that the kernels of a CPU use; auto: the best the machine has."""
    attention: str | None = None
    """Attention backend."""
    executor: Literal["auto", "inline", "ranks", "fake"] | None = None
    """Who computes: the core itself or rank processes; fake counts instead, to measure everything around the engine."""
    enforce_eager: bool | None = None
    """Launch all steps kernel by kernel on a GPU, instead of replaying CUDA graphs."""
    batch_invariance: bool | None = None
    """On a GPU have kernels of ours compute all products, so that no row's result depends on how many are beside it."""
    recurrence_chunks: bool | None = None
    """On a GPU have prompts in bf16 go through recurrences by chunks of 16 tokens, on tensor cores."""
    few_row_kernel: Literal["auto", "on", "off"] | None = None
    """On a GPU have a kernel of ours compute products of up to 16 rows: auto, where it is faster; on, always; off."""
    dependent_launch: bool | None = None
    """On a GPU of Hopper or later launch kernels while the ones before them end."""
    warm_up_graphs: bool | None = None
    """Capture the CUDA graphs of usual steps before the model is ready, and not as they are first needed."""
    graph_prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=8192)] | None = None
    """Have CUDA graphs also of steps with parts of prompts, up to so many tokens; 0: of decode steps alone."""
    tensor_parallel_size: RankCount | None = None
    """Ranks that share every layer."""
    pipeline_parallel_size: RankCount | None = None
    """Stages that follow each other, each with a part of the layers."""
    pipeline_layers: Layers | None = None
    """Layers of each stage, as in 10,12; unset: as even as can be."""
    enable_expert_parallel: bool | None = None
    """Give the ranks of a stage whole experts of a mixture, instead of a slice of each."""
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    """Who places ranks: mp on this machine, ray on the machines of a Ray cluster."""
    ray_address: str | None = None
    """Ray cluster, as in 10.0.0.1:6379; unset: RAY_ADDRESS, or the one that this machine belongs to."""
    threads: Count | None = None
    """CPU threads of a replica, divided over its ranks; 0 means every usable core, divided over all replicas."""
    data_parallel_size: ReplicaCount | None = None
    """Replicas of the engine; each has weights, cache and sequences of its own."""
    max_model_len: AtLeastOne | None = None
    """Longest sequence, prompt included."""
    max_queued_requests: AtLeastOne | None = None
    """Requests that may wait; more are refused with 429."""
    max_queued_tokens: AtLeastOne | None = None
    """Prompt tokens that may wait, over all requests; more are refused with 429."""
    default_request_timeout: Seconds | None = None
    """Seconds a request may take that has no timeout of its own; 0 is no limit."""
    max_num_seqs: AtLeastOne | None = None
    """Sequences that run at once."""
    max_num_batched_tokens: AtLeastOne | None = None
    """Tokens computed in one step."""
    target_ttft_ms: Milliseconds | None = None
    """Milliseconds to the first token that are wanted. Unset: a few seconds, more for long prompts."""
    target_itl_ms: Annotated[float, msgspec.Meta(ge=0, le=3_600_000)] | None = None
    """Milliseconds between tokens that are wanted; 0 is no limit. Unset: about twice what decoding alone takes."""
    target_tenants: str | None = None
    """Tenants whose requests may bring targets of their own: names apart by commas, or * for all."""
    ahead: Annotated[int, msgspec.Meta(ge=0, le=8)] | None = None
    """Steps scheduled before the last result is there."""
    admission: Literal["optimistic", "no_evict"] | None = None
    """Admit what fits now, or only what fits to its last token."""
    block_size: AtLeastOne | None = None
    """Tokens in one block of the KV cache."""
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] | None = None
    """Type of the KV cache; auto is the model's, fp8 is e4m3, on a GPU."""
    kv_cache_memory_fraction: Fraction | None = None
    """Share of the memory left after the weights. Unset: 0.5 of the host's, 0.9 of a GPU's."""
    gpu_memory_utilization: Fraction | None = None
    """Share of each GPU's whole memory for weights, steps and KV cache together, instead of a share of what is left."""
    kv_cache_bytes: Bytes | None = None
    """Size of the KV cache in bytes, instead of a share."""
    kv_cache_blocks: AtLeastOne | None = None
    """Size of the KV cache in blocks, instead of a share."""
    kv_cache_host_bytes: Bytes | None = None
    """Size in bytes of host memory for what a GPU's cache has no room for, until it is needed again."""
    kv_cache_dir: str | None = None
    """Keep cached blocks and states in this directory too, for the next start and for other servers that have it."""
    kv_cache_dir_bytes: Bytes | None = None
    """Bytes that all files in it may have; those used longest ago make room. Unset: 50 GB."""
    kv_cache_retention_bytes: Bytes | None = None
    """Size in bytes of what sessions may retain of the KV cache; unset: nothing, and the least recently used makes
    room."""
    state_cache_fraction: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    """Share of the KV cache's memory for snapshots of recurrent states, of models that have them."""
    prefix_caching: bool | None = None
    """Share the cache of equal prompt beginnings."""
    cache_hit_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Part of a prompt that has to be cached: else the answer is empty at once, with the reason cache_threshold."""
    kv_events_config: str | None = None
    """Tell routers what the cache holds: JSON by vLLM's keys, as in {"enable_kv_cache_events": true, "topic": "t"}."""
    kv_transfer_config: str | None = None
    """Compute prompts for other servers, or go on with what others computed: JSON by vLLM's keys."""
    speculative_config: str | None = None
    """Draft tokens and verify several in one step: JSON, as in {"method": "ngram", "num_speculative_tokens": 4}."""
    per_request_spec_decode_metrics: DraftReport | None = None
    """What answers tell of their drafts, in `metrics.speculative_decoding`."""
    tokenizer: str | None = None
    """Directory or hub id to read the tokenizer from, in place of the checkpoint's."""
    chat_template: str | None = None
    """Chat template in place of the checkpoint's: a file, or the template itself."""
    tool_call_parser: str | None = None
    """How it writes calls of tools: none, a parser's name as vLLM has it, or auto, as its chat template says."""
    reasoning_parser: str | None = None
    """How it writes its reasoning: none, a parser's name as vLLM has it, or auto, as its chat template says."""
    enable_lora: bool | None = None
    """Take LoRA adapters, which requests name."""
    max_loras: AtLeastOne | None = None
    """Different adapters in one step; sequences with others wait."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    """Largest rank of an adapter."""
    max_lora_bytes: Bytes | None = None
    """Memory for the adapters of a replica; those unused longest make room, and are read again when they are needed."""
    limit_mm_per_prompt: str | None = None
    """Images and sounds that a prompt may have, as in image=4; 0 for none."""
    mm_processor_kwargs: str | None = None
    """Settings that the checkpoint's processor of images has in place of its own, a JSON object, as in
    `{"max_pixels": 1003520}`. Requests may ask for less."""
    media_path: str | None = None
    """Directory below which file: URLs of images and sounds may lead; unset: none may."""
    media_domains: str | None = None
    """Hosts that images and sounds are fetched from, and all below them: names apart by commas, or * for all; unset:
    none is fetched."""
    media_max_bytes: Bytes | None = None
    """Size of an image's or a sound's file in bytes."""
    media_max_pixels: AtLeastOne | None = None
    """Pixels of an image, before it is scaled."""
    media_max_seconds: Annotated[float, msgspec.Meta(gt=0, le=14_400)] | None = None
    """Length of a sound in seconds."""
    media_processes: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Processes that decode and prepare images or sounds, of each model that sees or hears."""
    media_cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    """Memory for images and sounds as they were prepared, and again for what the model's encoder made of them."""
    share_media_cache: bool | None = None
    """Let a tenant find what was made of an image or a sound for another."""
    fake_step_seconds: Seconds | None = None
    """How long a step of the fake executor takes."""
    fake_token_seconds: Seconds | None = None
    """How much longer each token of a step makes it."""
    fake_vocab_size: AtLeastOne | None = None
    """Vocabulary of the fake executor."""
    fake_max_model_len: AtLeastOne | None = None
    """Longest sequence of the fake executor."""
    fake_state_bytes: Bytes | None = None
    """Size of a sequence's recurrent state in the fake executor. Unset: its model has none."""

    def given(self) -> dict[str, Any]:
        """The options that were set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_CACHE_FIELDS = {
    "block_size": "block_size",
    "kv_cache_dtype": "dtype",
    "prefix_caching": "prefix_caching",
    "kv_cache_memory_fraction": "memory_fraction",
    "gpu_memory_utilization": "gpu_utilization",
    "kv_cache_bytes": "bytes",
    "kv_cache_blocks": "blocks",
    "kv_cache_host_bytes": "host_bytes",
    "kv_cache_dir": "directory",
    "kv_cache_dir_bytes": "directory_bytes",
    "kv_cache_retention_bytes": "retention_bytes",
    "state_cache_fraction": "state_fraction",
}
_SCHEDULER_FIELDS = {
    name: name
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "target_ttft_ms",
        "target_itl_ms",
        "ahead",
        "admission",
        "cache_hit_threshold",
    )
}
_PARALLEL_FIELDS = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "pipeline_layers": "layers",
    "enable_expert_parallel": "whole_experts",
    "distributed_executor_backend": "backend",
    "ray_address": "ray_address",
}
_LORA_FIELDS = {"max_loras": "max_loras", "max_lora_rank": "max_rank", "max_lora_bytes": "max_bytes"}
_FAKE_FIELDS = {
    f"fake_{name}": name for name in ("step_seconds", "token_seconds", "vocab_size", "max_model_len", "state_bytes")
}


def parse_settings(parameters: Mapping[str, Any], kind: type[T]) -> T:
    """An instance of the dataclass `kind`, whose fields are the settings; values may be text.

    Raises:
        InvalidArgument: an unknown name, or a value of the wrong type or out of range; it names the parameter.
    """
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for name, text in parameters.items():
        if name not in types:
            message = f"unknown parameter '{name}'; known are {', '.join(types)}{did_you_mean(name, types)}"
            raise InvalidArgument(message, field=name)
        value = text
        if isinstance(text, str):
            value = plain_count(text) if takes_count(types[name]) else plain_value(name, text)
        try:
            settings[name] = msgspec.convert(value, types[name], strict=False)
        except msgspec.ValidationError as error:
            reason = _choices(types[name]) or describe_validation_error(error).reason
            raise InvalidArgument(f"parameter '{name}' {reason}, got {text!r}", field=name) from None
    return kind(**settings)


def _choices(expected: Any) -> str:
    choices = [choice for kind in get_args(expected) for choice in get_args(kind) if isinstance(choice, str)]
    return f"must be one of {', '.join(choices)}" if choices else ""


def engine_config(model: str, options: EngineOptions, lora_modules: str = "") -> EngineConfig:
    """The engine's own configuration for a checkpoint directory or hub id. `lora_modules`: adapters to begin with, a
    JSON object of their names and paths.

    Raises:
        InvalidArgument: the fake executor is set up, and another one computes; or adapters are, and none is taken; or
            both shares of memory are given; or see `read_speculation_config`.
    """
    given = options.given()
    if options.executor != "fake" and (stray := next(filter(given.__contains__, _FAKE_FIELDS), None)):
        raise InvalidArgument(f"{stray} is for the executor fake alone", field=stray)
    given["ahead_given"] = options.ahead is not None
    if options.gpu_memory_utilization is not None and options.kv_cache_memory_fraction is not None:
        message = "gpu_memory_utilization and kv_cache_memory_fraction are two ways to say one thing: give one"
        raise InvalidArgument(message, field="gpu_memory_utilization")
    if options.kv_cache_dtype == "fp8_e4m3":
        given["kv_cache_dtype"] = "fp8"
    cache = CacheConfig(**_take(given, _CACHE_FIELDS))
    scheduler = SchedulerConfig(**_take(given, _SCHEDULER_FIELDS))
    fake = FakeConfig(**_take(given, _FAKE_FIELDS))
    if options.pipeline_layers is not None:
        given["pipeline_layers"] = tuple(map(int, options.pipeline_layers.split(",")))
    if options.target_tenants is not None:
        given["target_tenants"] = tuple(name.strip() for name in options.target_tenants.split(","))
    parallel = ParallelConfig(**_take(given, _PARALLEL_FIELDS))
    given["lora"] = _lora_config(given, lora_modules)
    if (written := given.pop("kv_events_config", None)) is not None:
        given["kv_events"] = read_kv_events_config(written, cache.prefix_caching)
    if (written := given.pop("kv_transfer_config", None)) is not None:
        given["kv_transfer"] = read_kv_transfer_config(written, cache.prefix_caching)
    given["media"] = read_media_config(_take(given, MEDIA_FIELDS))
    if (written := given.pop("speculative_config", None)) is not None:
        given["speculation"] = read_speculation_config(written)
        path = given["speculation"].path
        if path and Path(path).resolve() not in _declared_drafters:
            message = f"the file {path} is run as code only where the command line names it: --drafter {path}"
            raise InvalidArgument(f"speculative_config: {message}", field="speculative_config")
        ranks = given["speculation"].draft_tensor_parallel_size
        if ranks not in (None, 1, parallel.tensor):
            message = f"draft_tensor_parallel_size must be 1 or tensor_parallel_size, {parallel.tensor}, got {ranks}"
            raise InvalidArgument(f"speculative_config: {message}", field="speculative_config")
    return EngineConfig(model=model, cache=cache, scheduler=scheduler, parallel=parallel, fake=fake, **given)


def _lora_config(options: dict[str, Any], modules: str) -> LoraConfig | None:
    limits = _take(options, _LORA_FIELDS)
    if options.pop("enable_lora", False):
        try:
            paths = msgspec.json.decode(modules or "{}", type=dict[str, str])
        except msgspec.MsgspecError as error:
            message = f"lora_modules must be a JSON object of names and directories: {error}"
            raise InvalidArgument(message, field="lora_modules") from None
        return LoraConfig(**limits, modules=paths)
    given = next(iter(limits), "modules" if modules else "")
    if given:
        name = {field: name for name, field in _LORA_FIELDS.items()}.get(given, "lora_modules")
        raise InvalidArgument(f"{name} needs enable_lora", field=name)
    return None


_NOT_SPECULATED = {
    **dict.fromkeys(("revision", "code_revision"), "name a directory, or a hub id"),
    **dict.fromkeys(("kv_cache_dtype", "max_model_len"), "the draft model's is the model's"),
    "parallel_drafting": "a draft model proposes one token after the other",
    "tensor_parallel_size": "one rank computes the draft model",
    **dict.fromkeys(
        ("rejection_sample_method", "synthetic_acceptance_length"),
        "a draft is accepted where it is what would have been sampled without it",
    ),
    "num_speculative_tokens_per_batch_size": "num_speculative_tokens is for all",
}
"""vLLM's keys that mean nothing to our engine, with the reason."""


_declared_drafters: set[Path] = set()


def declare_drafters(files: Iterable[Path], speculative_config: str | None = None) -> None:
    """Let models draft by these files, and by that of the command line's own `speculative_config`: they are code, which
    a model's files alone are not to bring in.

    Raises:
        InvalidArgument: there is no such file; or see `read_speculation_config`.
    """
    own = None if speculative_config is None else read_speculation_config(speculative_config).path
    for file in (*files, *([Path(own)] if own else [])):
        if not file.is_file():
            raise InvalidArgument(f"there is no file {file} that drafts", field="speculative_config")
        _declared_drafters.add(file.resolve())


_KEYS_OF_CUSTOM = ("method", "num_speculative_tokens", "path")


def read_speculation_config(written: str) -> SpeculationConfig:
    """What `speculative_config` says.

    Raises:
        InvalidArgument: it is no JSON object, or a key, a method or a number of it means nothing here.
    """
    field = "speculative_config"
    try:
        fields = msgspec.json.decode(written, type=dict[str, Any])
        if fields.get("method") == "custom":
            own = {key: value for key, value in fields.items() if key not in _KEYS_OF_CUSTOM}
            fields = {key: value for key, value in fields.items() if key not in own}
            if isinstance(path := fields.get("path"), str) and path:
                fields |= {"path": str(Path(path).resolve())}
            return msgspec.convert(fields | {"keys": own}, SpeculationConfig)
        if stray := next(filter(_NOT_SPECULATED.__contains__, fields), None):
            raise InvalidArgument(f"{field}: {stray} is not served: {_NOT_SPECULATED[stray]}", field=field)
        return msgspec.convert(fields, SpeculationConfig)
    except msgspec.ValidationError as error:
        path, reason, *_ = describe_validation_error(error)
        reason = f"must be one of {', '.join(SPECULATION_METHODS)}" if path == "method" else reason
        raise InvalidArgument(f"{field}: {path or 'it'} {reason}", field=field) from None
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{field} must be a JSON object: {error}", field=field) from None


def _take(options: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {field: options.pop(name) for name, field in names.items() if name in options}
