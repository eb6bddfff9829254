"""The options of a model that TensorRT-LLM runs, and how the repositories of Triton's TensorRT-LLM backends name them.

Options of our own engine that it has too go by the same names. None leaves a choice to TensorRT-LLM.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import yaml  # type: ignore[import-untyped]

from ...core.errors import InvalidArgument
from ...core.regular_files import read_text
from ...engine.options import AtLeastOne, Bytes, Fraction, Seconds
from ...tokenization.answers.answer_formats import AUTO, AnswerParsers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions:
    """Settings of one model. `speculative_config` and `lora_modules` are JSON objects: a decoding type and its fields;
    paths of adapters by their names.

    Raises:
        InvalidArgument: one of these is no such object.
    """

    tokenizer: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
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
        # Wrong ones are refused before anything is loaded.
        _ = self.adapters, self.speculation, self.parsers

    @property
    def parsers(self) -> AnswerParsers:
        """How the model writes calls of tools and reasoning."""
        return AnswerParsers(self.tool_call_parser, self.reasoning_parser)

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


_PARAMETERS = {
    "gpt_model_path": "model",
    "tokenizer_dir": "tokenizer",
    "batch_scheduler_policy": "admission",
    "max_tokens_in_paged_kv_cache": "kv_cache_tokens",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_memory_fraction",
    "kv_cache_host_memory_bytes": "kv_cache_host_bytes",
    "enable_kv_cache_reuse": "prefix_caching",
    "enable_chunked_context": "chunked_prefill",
}
"""Parameters in the config.pbtxt of Triton's older TensorRT-LLM backend -> settings."""
_YAML = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "enable_chunked_prefill": "chunked_prefill",
}
"""Names in the `model.yaml` of its newer one -> settings."""
_YAML_CACHE = {
    "enable_block_reuse": "prefix_caching",
    "free_gpu_memory_fraction": "kv_cache_memory_fraction",
    "max_tokens": "kv_cache_tokens",
    "max_gpu_total_bytes": "kv_cache_bytes",
    "host_cache_size": "kv_cache_host_bytes",
    "tokens_per_block": "block_size",
    "dtype": "kv_cache_dtype",
}
_ADMISSION = {"guaranteed_no_evict": "no_evict", "max_utilization": "optimistic"}

_ONLY: dict[str, tuple[str, ...]] = {
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching", "V1"),
    "decoding_mode": ("top_k", "top_p", "top_k_top_p"),
    "backend": ("pytorch",),
    "lora_prefetch_dir": (),
    "encoder_model_path": (),
    "medusa_choices": (),
    "eagle_choices": (),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
}
"""Parameters that are supported only at these values."""

_PER_REQUEST = {"exclude_input_in_output", "triton_config"}
"""Settings of the tensors, and not of the engine."""

_IDLE = {
    "cancellation_check_period_ms",
    "cross_kv_cache_fraction",
    "cuda_graph_cache_size",
    "cuda_graph_mode",
    "enable_context_fmha_fp32_acc",
    "enable_trt_overlap",
    "executor_worker_path",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "gpu_device_ids",
    "gpu_weights_percent",
    "iter_stats_max_iterations",
    "kv_cache_onboard_blocks",
    "logits_post_processors",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_cache_max_adapter_size",
    "lora_cache_optimal_adapter_size",
    "max_attention_window_size",
    "max_beam_width",
    "multi_block_mode",
    "normalize_log_probs",
    "num_nodes",
    "participant_ids",
    "recv_poll_period_ms",
    "request_stats_max_iterations",
    "sink_token_length",
    "speculative_decoding_fast_logits",
    "stats_check_period_ms",
    "xgrammar_tokenizer_info_path",
}
"""Parameters without effect here: places and periods of other processes, sizes for what requests may not ask for."""


class SourceSettings(NamedTuple):
    """`model`: a directory or hub id. `settings`: by our names. `idle`: parameters that have no effect."""

    model: str
    settings: dict[str, Any]
    idle: tuple[str, ...] = ()


def is_set(value: str) -> bool:
    """Whether a parameter has a value, and no placeholder of Triton's templates that was not filled in."""
    return bool(value) and not value.startswith("${")


def read_model_source(path: str, parameters: Mapping[str, str]) -> SourceSettings:
    """The directory or hub id of a model, and its settings by our names: from a version's directory, a checkpoint or a
    hub id, and the parameters of its config. A setting that would change answers and is not supported is refused.

    Raises:
        InvalidArgument: something is asked for that cannot be served; `field` names it.
    """
    written: dict[str, Any] = {}
    for name, value in read_model_yaml(path).items():
        if name == "kv_cache_config" and isinstance(value, dict):
            written |= {_YAML_CACHE.get(field, f"{name}.{field}"): setting for field, setting in value.items()}
        elif value is not None:
            written[_YAML.get(name, name)] = value
    written |= {_PARAMETERS.get(name, name): value for name, value in parameters.items() if is_set(value)}
    settings = {name: _converted(name, value) for name, value in written.items() if name not in _IDLE | _PER_REQUEST}
    settings = {name: value for name, value in settings.items() if name not in _ONLY}
    return SourceSettings(settings.pop("model", path), settings, tuple(sorted(_IDLE & written.keys())))


def read_model_yaml(path: str) -> dict[str, Any]:
    """The arguments in the `model.yaml` of a version's directory, or in the file that LLM_CONFIG_PATH names in its
    place; none without one. Raises `InvalidArgument` for another kind of file."""
    file = Path(path) / "model.yaml"
    if not file.is_file():
        return {}
    file = Path(os.environ.get("LLM_CONFIG_PATH") or file)
    try:
        content = yaml.safe_load(read_text(file))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{file} must hold the arguments of TensorRT-LLM's LLM, by name")
    return {str(name): value for name, value in content.items()}


def _converted(name: str, value: Any) -> Any:
    if name in _ONLY and str(value) not in _ONLY[name]:
        raise InvalidArgument(f"parameter '{name}': '{value}' is not served here", field=name)
    if name == "admission":
        return _ADMISSION.get(value, value)
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value
