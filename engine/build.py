"""What the repository's table of kinds knows of this floor: how to build a language model."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..core.model import Model
from ..tokenization.files import read_json
from .llm import LlmModel
from .options import EngineOptions, engine_config, parse_options

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


def language_model(
    name: str,
    version: str,
    path: str,
    parameters: Mapping[str, str],
    on_progress: Callable[[str, float, float, str], None],
    memory: int | None = None,
) -> Model:
    """A language model over the checkpoint at `path`, which the parameter `model` may replace. `memory`: all the bytes
    of the host's that it may take, None whatever is free.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    checkpoint, options = _read(path, parameters)
    config = msgspec.structs.replace(engine_config(checkpoint, options), host_memory=memory)
    return LlmModel(name, version, config, on_progress)


def host_memory_needed(path: str, parameters: Mapping[str, str], gpu: bool) -> int:
    """Bytes of the host's memory for weights, and for a cache whose bytes are given. None of a checkpoint that is to be
    downloaded yet, on a GPU, and of ranks that Ray places: it knows each machine better.

    Raises:
        InvalidArgument: see `language_model`.
    """
    checkpoint, options = _read(path, parameters)
    placed = options.distributed_executor_backend == "ray"
    if options.executor == "fake" or placed or not _on_host(options.device or "auto", gpu):
        return 0
    stored = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    each = int(stored * _shrunk(checkpoint, options)) + (options.kv_cache_bytes or 0)
    return each * (options.data_parallel_size or 1)


def _read(path: str, parameters: Mapping[str, str]) -> tuple[str, EngineOptions]:
    settings = dict(parameters)
    return settings.pop("model", path), parse_options(settings)


def _on_host(device: str, gpu: bool) -> bool:
    return device == "cpu" or (device == "auto" and not gpu)


def _shrunk(checkpoint: str, options: EngineOptions) -> float:
    """What becomes of a stored byte."""
    config = read_json(Path(checkpoint) / "config.json")
    stored = _WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return (1 if options.quantization == "int8" else _WIDTHS.get(options.dtype or "auto", stored)) / stored
