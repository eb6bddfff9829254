"""Builds a language model of our own engine, and says what one needs before it loads: the entries of the repository's
table of backends. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from ..core.errors import CharoniaError, InvalidArgument
from ..core.gguf_files import GGUF_SUFFIX
from ..core.model import MemoryNeed, ModelConfig, TextModel
from ..processes.host import torch_has_cuda, usable_cores
from ..tokenization.checkpoint_files import locate_checkpoint, read_json
from ..tokenization.gguf_file import GgufFile, read_gguf
from .checkpoint.adapter_files import read_adapter
from .checkpoint.hf_checkpoint import find_weights
from .checkpoint.quantization_config import StoredQuantization, read_quantization, stored_bits
from .config import EngineConfig, LoraConfig, SpeculationConfig
from .frontend.llm import LlmModel, TokenizerBundle, own_engine_spec
from .options import EngineOptions, engine_config, parse_settings, read_speculation_config

_CROWD = 4
"""Threads for each core of this machine that are refused as meant for another."""

_QUANTIZED = ("int8", "fp8", "int4")
"""int4 is calibrated in eight bits."""

_CODE_BYTES = {True: 0.625, False: 1.125}
"""Bytes of a code in groups of 32 that has at most four bits, or more."""

_WEIGHT_NAMES = (".weight", ".bias", ".qweight", ".weight_packed")
"""Ends of the names of tensors that hold numbers, not what belongs to them."""

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


def language_model(
    written: ModelConfig,
    path: str,
    parameters: Mapping[str, str],
    on_progress: Callable[[str, float, float, str], None],
    memory: int | None = None,
    gpu_memory: int | None = None,
) -> TextModel:
    """A language model over the checkpoint at `path`, which the parameter `model` may replace. `written`: its config.
    `memory`, `gpu_memory`: bytes of the host's memory, and of each GPU's, that it may take; None for all that is free.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    return LlmModel(written.name, written.version, granted_config(path, parameters, memory, gpu_memory), on_progress)


def granted_config(
    path: str, parameters: Mapping[str, Any], memory: int | None = None, gpu_memory: int | None = None
) -> EngineConfig:
    """The configuration of a model's engine. Arguments, and errors: see `language_model`."""
    checkpoint, options, lora_modules = _read(path, parameters)
    here = usable_cores().logical
    # More are meant for another machine; ranks that Ray places may have more cores than are here.
    if (options.threads or 0) > _CROWD * here and options.distributed_executor_backend != "ray":
        message = f"threads: {options.threads} is more than {_CROWD} for each of the {here} cores that there are"
        raise InvalidArgument(message, field="threads")
    plain = engine_config(checkpoint, options, lora_modules)
    return msgspec.structs.replace(plain, host_memory=memory, gpu_memory=gpu_memory)


def memory_needed(path: str, parameters: Mapping[str, Any], gpus: Sequence[int]) -> tuple[MemoryNeed, ...]:
    """The memory that weights and adapters need, and a cache whose bytes are given: of the host, or of each GPU that
    has a rank. `gpus`: the numbers of those here. No weights are counted of a checkpoint that is yet to be downloaded,
    and nothing for ranks that Ray places: it knows each machine better.

    Raises:
        InvalidArgument: see `language_model`.
    """
    checkpoint, options, _ = _read(path, parameters)
    if options.executor == "fake" or options.distributed_executor_backend == "ray":
        return ()
    weights, cache = _weight_bytes(Path(checkpoint), options), options.kv_cache_bytes or 0
    if options.speculative_config is not None:
        weights += _draft_bytes(read_speculation_config(options.speculative_config), options)
    if options.enable_lora:
        weights += options.max_lora_bytes or LoraConfig().max_bytes
    device, replicas = options.device or "auto", options.data_parallel_size or 1
    if computes_on_host(device, gpus):
        return (MemoryNeed((weights + cache + (options.kv_cache_host_bytes or 0)) * replicas),)
    host = MemoryNeed((options.kv_cache_host_bytes or 0) * replicas)
    ranks = (options.tensor_parallel_size or 1) * (options.pipeline_parallel_size or 1)
    _, _, number = device.partition(":")
    taken = [int(number)] if number.isdecimal() else range(ranks * replicas)  # see `worker.loaded_rank.assign_device`
    on_gpus = (MemoryNeed(weights // ranks + cache, gpu) for gpu in taken)
    return (host, *on_gpus) if host.size else (*on_gpus,)


def computes_on_host(device: str | None, gpus: Sequence[int]) -> bool:
    """Whether an engine with this option `device` will compute on the host, where there are these GPUs."""
    return device == "cpu" or (device in (None, "auto") and not (gpus and torch_has_cuda()))  # as torch will choose


def examine(path: str, parameters: Mapping[str, Any]) -> str:
    """Check a checkpoint as loading it would, but read no weights. Return what only loading will find out, if anything.

    Raises:
        CharoniaError: it would not load.
    """
    from .worker.loaded_rank import check_rank_config as examine_weights  # torch takes a second to import

    checkpoint, options, lora_modules = _read(path, parameters)
    if not Path(checkpoint).exists():
        return f"{checkpoint} is not here yet"
    config = engine_config(checkpoint, options, lora_modules)
    own_engine_spec(config)
    unknown = [] if config.lora is None else _examine_adapters(config.lora)
    TokenizerBundle.load(checkpoint, options.chat_template or "", options.tokenizer or "")
    unknown.append("" if options.executor == "fake" else examine_weights(config))
    return "; ".join(filter(None, unknown))


def _examine_adapters(lora: LoraConfig) -> list[str]:
    """Read the adapters of the start; whether their matrices fit the model, its load tells. Returns what is said of
    those of the hub, which are not fetched."""
    remote = []
    for path in lora.modules.values():
        if Path(path).is_dir() or path.startswith(("/", ".", "~")):
            read_adapter(path, lora)
        else:
            remote.append(f"adapter {path} is not here yet")
    return remote


def is_model_file(path: Path) -> bool:
    """Whether the name is that of a language model in one file."""
    return path.suffix == GGUF_SUFFIX


def describe(path: str) -> list[str]:
    """What serving a checkpoint would be like on this machine, line by line.

    Raises:
        CharoniaError: it would not load.
    """
    from .worker.roofline import describe_checkpoint  # torch takes a second to import

    return [*describe_checkpoint(path), *filter(None, [examine(path, {})])]


def _weight_bytes(directory: Path, options: EngineOptions) -> int:
    """Bytes that the weights take in memory; errors in them are told when they are loaded."""
    try:
        if directory.exists() and (gguf := locate_checkpoint(str(directory))).is_file():
            return _gguf_bytes(read_gguf(gguf), options)
        files = [file for file in find_weights(directory).files if file.exists()]
        stored = sum(file.stat().st_size for file in files)
        config = read_json(directory / "config.json") if stored else {}
        if quantised := read_quantization(config, str(directory)):
            return _quantised_bytes(files, quantised, options)
    except (CharoniaError, OSError, SafetensorError):
        return 0
    if not stored:
        return 0
    stored_width = _WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    width = 1 if options.quantization in _QUANTIZED else _WIDTHS.get(options.dtype or "auto", stored_width)
    return int(stored * (width / stored_width))


def _draft_bytes(speculation: SpeculationConfig, options: EngineOptions) -> int:
    """Bytes of the weights of the model that drafts, if one does."""
    if not speculation.model:
        return 0
    kept = replace(options, quantization=speculation.quantization or options.quantization)
    return _weight_bytes(Path(speculation.model), kept)


def _gguf_bytes(file: GgufFile, options: EngineOptions) -> int:
    """Numbers in blocks stay in about as many bits, those of five and six in eight, where C's kernels multiply with
    them; the table of embeddings becomes floats."""
    float_bytes, integers = _served_widths(options)
    total = 0.0
    for tensor in file.tensors.values():
        numbers = prod(tensor.shape)
        total += numbers * (tensor.type.kept_bytes if integers and tensor.type.values > 1 else float_bytes)
        total += numbers * float_bytes if tensor.name == "token_embd.weight" else 0
    return int(total)


def _quantised_bytes(files: Sequence[Path], stored: StoredQuantization, options: EngineOptions) -> int:
    """Codes are kept in four bits or in eight, with scales for every 32; where they are computed with as floats, and
    FP8, which GPUs alone keep, in the model's dtype. What stands beside a matrix in the file takes no memory."""
    float_bytes, integers = _served_widths(options)
    bits = stored_bits(stored)
    kept, total = {"I32": _CODE_BYTES[bits <= 4], "I8": _CODE_BYTES[False]} if integers else {}, 0.0
    for file in files:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(_WEIGHT_NAMES):
                    tensor = opened.get_slice(name)
                    dtype = tensor.get_dtype()
                    numbers = prod(tensor.get_shape()) * (32 / bits if dtype == "I32" else 1)
                    total += numbers * kept.get(dtype, float_bytes)
    return int(total)


def _served_widths(options: EngineOptions) -> tuple[int, bool]:
    """Bytes of a float of a quantised file, and whether its integers are computed with: C's kernels do, in bfloat16."""
    float_bytes = _WIDTHS.get(options.dtype or "auto", 2)
    return float_bytes, float_bytes < 4 and options.device in (None, "auto", "cpu")


def _read(path: str, parameters: Mapping[str, Any]) -> tuple[str, EngineOptions, str]:
    """The checkpoint, the options, and `lora_modules`, which no flag of the engine has."""
    settings = dict(parameters)
    model, lora_modules = settings.pop("model", path), settings.pop("lora_modules", "")
    return model, parse_settings(settings, EngineOptions), lora_modules
