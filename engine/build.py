"""Our own engine as a backend: builds a language model, and says what one needs before it loads. Imports no torch."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..core.backends import OnProgress, TextBackend
from ..core.errors import CharoniaError, InvalidArgument, NotFound
from ..core.gguf_files import GGUF_SUFFIX
from ..core.media import plural_nouns
from ..core.media_models import MediaPart, MediaRefusal, MediaServices, TowerSpec
from ..core.model import MemoryNeed, ModelConfig, TextModel
from ..processes.host import torch_has_cuda, usable_cores
from ..telemetry.host_metrics import Gpus
from ..tokenization.checkpoint_files import locate_checkpoint
from .checkpoint.adapter_files import read_adapter
from .checkpoint.hf_checkpoint import open_checkpoint
from .checkpoint.media_support import attends_to_encoder, media_kinds, refused_media, sees_both_ways, writes_sounds_down
from .checkpoint.model_spec import CheckpointError
from .checkpoint.weight_memory import WeightUse, count_weight_bytes
from .client.client import own_engine_spec
from .client.infer import OWN_LAYOUT
from .client.llm import LlmModel
from .client.model_media import ModelMedia, RowShape
from .client.speech_tensors import SpeechLayout
from .client.tokenizer_bundle import TokenizerBundle
from .config import EngineConfig, LoraConfig
from .media_options import options_without_effect
from .options import EngineOptions, engine_config, parse_settings, read_speculation_config

log = logging.getLogger(__name__)

_CROWD = 4
"""Threads for each core of this machine that are refused as meant for another."""
_SOUND_ENCODER = "charonia.engine.models.sound_encoder:load_sound_encoder"
_SOUND_ALIGNER = "charonia.engine.models.sound_aligner:load_sound_aligner"
_TEXT_ENCODER = "charonia.engine.models.text_encoder:load_text_encoder"
_MADE_PRECISIONS = ("int8", "fp8")
"""What an encoder's plain weights become with a decoder's."""


def language_model(
    written: ModelConfig,
    path: str,
    parameters: Mapping[str, str],
    on_progress: OnProgress,
    memory: int | None = None,
    gpu_memory: int | None = None,
    media: MediaServices | MediaRefusal | None = None,
) -> TextModel:
    """A language model over the checkpoint at `path`, which the parameter `model` may replace. `written`: its config.
    `memory`, `gpu_memory`: bytes of the host's memory, and of each GPU's, that it may take; None for all that is free.
    `media`: of its `media_part`.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    config = granted_config(path, parameters, memory, gpu_memory)
    seen = model_media(written.name, config, media)
    layout = SpeechLayout() if seen.transcribes else OWN_LAYOUT
    return LlmModel(written.name, written.version, config, on_progress, layout, seen)


def model_media(name: str, config: EngineConfig, media: MediaServices | MediaRefusal | None) -> ModelMedia:
    """What reads the media of a model's prompts. The log names options of media that the model has no use for: they may
    be meant for another."""
    try:
        place = locate_checkpoint(config.model)
        refusals = refused_media(place, config.media.per_prompt)
    except CharoniaError:  # which its load tells
        return ModelMedia(media if isinstance(media, MediaServices) else None)
    services = media if isinstance(media, MediaServices) else None
    if unused := options_without_effect(config.media, services):
        taken = f"{plural_nouns(services.kinds)} alone" if services and services.kinds else "no images and no sounds"
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in unused)
        log.warning("model '%s' takes %s: without effect: %s", name, taken, flags)
    if isinstance(media, MediaRefusal):
        refusals |= dict.fromkeys(media_kinds(place), media.reason)
    if not isinstance(media, MediaServices):
        return ModelMedia(refusals=refusals, place=str(place))
    rows = _row_shape(config.model) if "image" in media.kinds else None
    return ModelMedia(media, sees_both_ways(place), None, rows, refusals, str(place))


def _row_shape(model: str) -> RowShape | None:
    """The rows of a checkpoint's images; None where they are not known, or its load tells what is wrong."""
    with suppress(CheckpointError):
        checkpoint = open_checkpoint(model)
        if "text_config" in checkpoint.config:  # whose language part transformers computes
            hidden = checkpoint.config["text_config"].get("hidden_size")
            return RowShape(hidden) if isinstance(hidden, int) else None
        return RowShape(checkpoint.spec.hidden_size, checkpoint.spec.deepstack)
    return None


def granted_config(
    path: str, parameters: Mapping[str, Any], memory: int | None = None, gpu_memory: int | None = None
) -> EngineConfig:
    """The configuration of a model's engine. Arguments, and errors: see `language_model`."""
    checkpoint, options, lora_modules = _read(path, parameters)
    cores = usable_cores().logical
    # More are meant for another machine; ranks that Ray places may have more cores than are here.
    if (options.threads or 0) > _CROWD * cores and options.distributed_executor_backend != "ray":
        message = f"threads: {options.threads} is more than {_CROWD} for each of the {cores} cores that there are"
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
    device, replicas = options.device or "auto", options.data_parallel_size or 1
    ranks = (options.tensor_parallel_size or 1) * (options.pipeline_parallel_size or 1)
    _, _, number = device.partition(":")
    taken = [int(number)] if number.isdecimal() else range(ranks * replicas)  # see `worker.devices.assign_device`
    on_host, cache = computes_on_host(device, gpus), options.kv_cache_bytes or 0
    weights = _weight_bytes(checkpoint, options, None if on_host else min(map(Gpus().capability, taken)))
    if on_host:
        return (MemoryNeed((weights + cache + (options.kv_cache_host_bytes or 0)) * replicas),)
    host = MemoryNeed((options.kv_cache_host_bytes or 0) * replicas)
    on_gpus = (MemoryNeed(weights // ranks + cache, gpu) for gpu in taken)
    return (host, *on_gpus) if host.size else (*on_gpus,)


def computes_on_host(device: str | None, gpus: Sequence[int]) -> bool:
    """Whether an engine with this option `device` will compute on the host, where there are these GPUs."""
    return device == "cpu" or (device in (None, "auto") and not (gpus and torch_has_cuda()))  # as torch will choose


def media_part(path: str, parameters: Mapping[str, Any], gpus: Sequence[int]) -> MediaPart | None:
    """The part of a model that sees, hears, or reads apart: its tower computes beside the first rank. None for another
    model, one whose media are not served or for which `limit_mm_per_prompt` allows none. Raises as `language_model`."""
    checkpoint, options, lora_modules = _read(path, parameters)
    if options.executor == "fake":
        return None
    media = engine_config(checkpoint, options, lora_modules).media
    try:
        located = locate_checkpoint(checkpoint)
        encoder = _own_encoder(located)
        kinds = tuple(kind for kind in media_kinds(located) if encoder or media.per_prompt.get(kind))
        if not (kinds or encoder):
            return None
        directory = open_checkpoint(checkpoint).directory  # the tower's weights of one of the hub are there then, too
    except NotFound:  # which its load tells
        return None
    _, _, number = (options.device or "").partition(":")
    gpu = None if computes_on_host(options.device, gpus) else int(number) if number.isdecimal() else gpus[0]
    tower = TowerSpec(str(directory), options.dtype or "auto", gpu, media.cache_bytes, media.share_cache, kinds=kinds)
    if encoder:
        precision = options.quantization if options.quantization in _MADE_PRECISIONS else "none"
        aligner = _SOUND_ALIGNER if encoder == _SOUND_ENCODER else ""
        tower = tower._replace(own_encoder=encoder, own_aligner=aligner, quantization=precision)
    return MediaPart(media, tower)


def _own_encoder(directory: Path) -> str:
    """The function that loads the encoder that a checkpoint's decoder attends to; empty if there is none."""
    if not attends_to_encoder(directory):
        return ""
    return _SOUND_ENCODER if writes_sounds_down(directory) else _TEXT_ENCODER


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


def _weight_bytes(checkpoint: str, options: EngineOptions, capability: int | None) -> int:
    """Bytes of the weights, of those of a model that drafts, and of adapters. `capability`: see `WeightUse`."""
    use = WeightUse(options.dtype or "auto", options.quantization or "none", capability)
    total = count_weight_bytes(Path(checkpoint), use)
    if options.speculative_config is not None:
        draft = read_speculation_config(options.speculative_config)
        own = use._replace(quantization=draft.quantization or use.quantization)
        total += count_weight_bytes(Path(draft.model), own) if draft.model else 0
    return total + (options.max_lora_bytes or LoraConfig().max_bytes if options.enable_lora else 0)


def _read(path: str, parameters: Mapping[str, Any]) -> tuple[str, EngineOptions, str]:
    """The checkpoint, the options, and `lora_modules`, which no flag of the engine has."""
    settings = dict(parameters)
    model, lora_modules = settings.pop("model", path), settings.pop("lora_modules", "")
    return model, parse_settings(settings, EngineOptions), lora_modules


TEXT_BACKEND = TextBackend(language_model, memory_needed, examine, serves_checkpoints=True, find_media_part=media_part)
