"""Models of Triton's TensorRT-LLM repositories on our own engine, where TensorRT-LLM is not installed: their checkpoint
is a Hugging Face directory, and their settings are ours as far as we have them."""

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import InvalidArgument
from ...engine.build import computes_on_host
from ...engine.config import CacheConfig
from ...engine.options import EngineOptions
from ...telemetry.host_metrics import usable_gpus
from ...tokenization.checkpoint_files import read_json
from .options import SourceSettings, is_set, read_model_source

_CACHE_SHARE = "kv_cache_memory_fraction"
_CACHE_TOKENS = "kv_cache_tokens"
_CACHE_DTYPE = "kv_cache_dtype"
_ADAPTER_CACHE = {"lora_cache_max_adapter_size": "max_lora_rank", "lora_cache_host_memory_bytes": "max_lora_bytes"}
"""Sizes of TensorRT-LLM's cache of adapters -> our settings."""
_ALWAYS_SO = {"chunked_prefill", "trust_remote_code", "guided_decoding_backend"}
"""Settings that ask for what is so, or for what a request has to use before it means anything."""


class OwnSettings(NamedTuple):
    """`parameters`: of our own engine, the checkpoint as `model`. `idle`: those without a meaning for it."""

    parameters: dict[str, Any]
    idle: tuple[str, ...]


def computes_here(path: str, parameters: Mapping[str, str]) -> bool:
    """Whether our own engine serves the model: it is of a Triton repository, and TensorRT-LLM is not installed."""
    of_triton = "gpt_model_path" in parameters or (Path(path) / "model.yaml").is_file()
    return of_triton and find_spec("tensorrt_llm") is None


def read_own_settings(path: str, parameters: Mapping[str, str]) -> OwnSettings:
    """The settings of our own engine for a version's directory and the parameters of its config.

    Raises:
        InvalidArgument: there is no checkpoint, or none that it can read; or see `read_model_source`.
    """
    source = read_model_source(path, parameters)
    _check_checkpoint(path, source)
    known = {field.name for field in fields(EngineOptions)}
    settings = {name: value for name, value in source.settings.items() if name not in _ALWAYS_SO}
    idle = {*source.idle, *(settings.keys() - known - {_CACHE_TOKENS})}
    if _CACHE_TOKENS in settings:
        block = _number("block_size", settings.get("block_size", CacheConfig().block_size))
        settings["kv_cache_blocks"] = max(1, _number(_CACHE_TOKENS, settings.pop(_CACHE_TOKENS)) // block)
    on_host = computes_on_host(settings.get("device"), usable_gpus())
    if str(settings.get(_CACHE_DTYPE, "auto")) not in (("auto", "int8") if on_host else ("auto", "int8", "fp8")):
        idle.add(_CACHE_DTYPE)
    if _CACHE_SHARE in settings and on_host:
        del settings[_CACHE_SHARE]
        idle.add("kv_cache_free_gpu_mem_fraction (no GPU computes)")
    taken = {name: value for name, value in settings.items() if name in known and name not in idle}
    taken |= _adapter_settings(parameters, settings)
    idle -= {*_ADAPTER_CACHE, *taken}
    return OwnSettings({**taken, "model": source.model}, tuple(sorted(idle)))


def _adapter_settings(parameters: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to set of adapters: a size of their cache asks for them, unless `enable_lora` says otherwise."""
    sizes = {ours: parameters[name] for name, ours in _ADAPTER_CACHE.items() if is_set(parameters.get(name, ""))}
    chosen = {name: settings[name] for name in ("enable_lora", "lora_modules", *sizes) if name in settings}
    enabled = str(chosen.get("enable_lora", bool(sizes))).lower() in ("true", "1")
    return {"enable_lora": "true", **sizes, **chosen} if enabled else {}


def _number(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise InvalidArgument(f"parameter '{name}' must be a whole number of at least 1, got {value!r}", field=name)
    return number


def _check_checkpoint(path: str, source: SourceSettings) -> None:
    directory = Path(source.model).expanduser()
    config = read_json(directory / "config.json") if directory.is_dir() else {}
    engines = [directory] if directory.suffix == ".engine" else [*directory.glob("*.engine")]
    if engines or "pretrained_config" in config or "builder_config" in config:
        raise InvalidArgument(
            f"{directory} is an engine that TensorRT-LLM built, and TensorRT-LLM is not installed: install it (pip "
            "install '.[tensorrt-llm]'), or set 'gpt_model_path' to the Hugging Face directory that the engine "
            "was built from",
            field="gpt_model_path",
        )
    if source.model == path and not (directory / "config.json").is_file():
        message = f"the parameter 'gpt_model_path' is not set, and there is no checkpoint in {path}"
        raise InvalidArgument(f"{message}: set it to a Hugging Face directory", field="gpt_model_path")
