"""Translates model repositories of Triton's TensorRT-LLM backends to our settings: config.pbtxt's parameters of the
older backend, `model.yaml` of the newer one.

A setting that would change answers and is not supported is refused; one that only tunes their process is named in the
log.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml  # type: ignore[import-untyped]

from ...core.errors import InvalidArgument

log = logging.getLogger(__name__)

_RENAMED = {
    "gpt_model_path": "model",
    "tokenizer_dir": "tokenizer",
    "batch_scheduler_policy": "admission",
    "max_tokens_in_paged_kv_cache": "kv_cache_tokens",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_memory_fraction",
    "kv_cache_host_memory_bytes": "kv_cache_host_bytes",
    "enable_kv_cache_reuse": "prefix_caching",
    "enable_chunked_context": "chunked_prefill",
}
_YAML = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "enable_chunked_prefill": "chunked_prefill",
}
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
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
    "max_beam_width": ("1",),
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

_IDLE = {
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "recv_poll_period_ms",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "executor_worker_path",
    "xgrammar_tokenizer_info_path",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "enable_trt_overlap",
    "normalize_log_probs",
    "exclude_input_in_output",
    "triton_config",
}
"""Parameters without effect here: periods of a loop that is not ours, and settings that each request has for itself."""


class TrtllmModelSource(NamedTuple):
    """The directory or hub id of a model, and its settings by our names."""

    model: str
    settings: dict[str, Any]


def read_model_source(path: str, parameters: Mapping[str, str]) -> TrtllmModelSource:
    """Read a version's directory, or a checkpoint or hub id, and the parameters of its config.

    Raises:
        InvalidArgument: something is asked for that cannot be served; `field` names it.
    """
    file = Path(path) / "model.yaml"
    settings = _read_yaml(file) if file.is_file() else {}
    for name, value in parameters.items():
        if value and not value.startswith("${"):  # a placeholder of Triton's templates that was not filled in
            settings.update(_translated(name, value, _RENAMED))
    return TrtllmModelSource(settings.pop("model", path), settings)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{file} must hold the arguments of TensorRT-LLM's LLM, by name")
    settings: dict[str, Any] = {}
    for name, value in content.items():
        if name == "kv_cache_config" and isinstance(value, dict):
            for field, each in value.items():
                settings.update(_cache_setting(field, each))
        elif value is not None:
            settings.update(_translated(str(name), value, _YAML))
    return settings


def _cache_setting(field: str, value: Any) -> dict[str, Any]:
    if field not in _YAML_CACHE:
        known = ", ".join(_YAML_CACHE)
        raise InvalidArgument(f"kv_cache_config: unknown field '{field}'; known are {known}", field=field)
    return {_YAML_CACHE[field]: value}


def _translated(name: str, value: Any, names: Mapping[str, str]) -> dict[str, Any]:
    if name in _ONLY:
        if str(value) not in _ONLY[name]:
            raise InvalidArgument(f"parameter '{name}': '{value}' is not served here", field=name)
        return {}
    if name in _IDLE:
        log.warning("parameter '%s' has no effect here", name)
        return {}
    if isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    ours = names.get(name, name)
    return {ours: _ADMISSION.get(value, value) if ours == "admission" else value}
