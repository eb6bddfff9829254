"""Reads `model.json` in a version's directory, the engine arguments of Triton's vLLM backend, as settings of our
engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidArgument, did_you_mean
from ...telemetry.host_metrics import usable_gpus
from ...tokenization.checkpoint_files import read_json
from ..build import computes_on_host
from ..options import EngineOptions, parse_settings, read_speculation_config
from .arguments import (
    CHANGES_ANSWERS,
    ELSEWHERE,
    NOT_SERVED,
    OWN_NAMES,
    OWN_VALUES,
    WITHOUT_EFFECT,
    asks_for_nothing,
)

_FILE = "model.json"
_ADAPTERS = "multi_lora.json"
_PATHS = ("model", "tokenizer")
_OF_THE_BACKEND = {"REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK"}
"""Parameters in config.pbtxt for what is always so: metrics, and readiness that asks the engine."""
_DEVICES = "GPU_DEVICE_IDS"
_SPECULATION = "speculative_config"


class ModelJson(NamedTuple):
    """The contents of `model.json`."""

    parameters: dict[str, Any]
    """The settings of our engine, with the checkpoint, a directory or a hub id, as `model`."""
    idle: dict[str, str]
    """Arguments without effect, with the reason."""


def read_model_json(directory: str, parameters: Mapping[str, str]) -> ModelJson:
    """Read the arguments in a version's directory. `parameters`: settings in config.pbtxt, which win. Raises
    `InvalidArgument` for a missing file or wrong argument, which the message names."""
    file = Path(directory) / _FILE
    if not file.is_file():
        raise InvalidArgument(f"there is no {file}: it has the engine arguments of a model of the vllm backend")
    arguments = read_json(file)
    try:
        paths = {name: _located(file, name, value) for name in _PATHS if (value := arguments.pop(name, None))}
        if "model" not in paths:
            raise InvalidArgument("it names no model: set 'model' to the directory of a checkpoint, or to a hub id")
        revision = arguments.pop("revision", None)
        if revision and not Path(paths["model"]).is_dir():
            paths["model"] = f"{paths['model']}@{revision}"
        settings, idle = _translated(arguments, parameters.get("device"))
        if settings.get("enable_lora"):
            settings["lora_modules"] = msgspec.json.encode(_read_adapters(file.with_name(_ADAPTERS))).decode()
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error.message}") from None
    own = {name: value for name, value in parameters.items() if name not in {*_OF_THE_BACKEND, _DEVICES}}
    if _DEVICES in parameters:
        idle[_DEVICES] = "CUDA_VISIBLE_DEVICES of the server, or the parameter 'device'"
    return ModelJson({**paths, **settings, **own}, idle)


def _read_adapters(file: Path) -> dict[str, str]:
    """The directories of adapters by their names; they may be relative to the file."""
    if not file.is_file():
        raise InvalidArgument(f"with enable_lora, there must be {file}, of the adapters' directories by their names")
    return {name: _located(file, name, path) for name, path in read_json(file).items()}


def _located(file: Path, name: str, value: Any) -> str:
    """The absolute path of a directory, which may be relative to the file's; a hub id as it is."""
    if not isinstance(value, str):
        raise InvalidArgument(f"argument '{name}' must be a directory or a hub id, got {value!r}")
    local = file.parent / Path(value).expanduser()
    if local.is_dir():
        return str(local.resolve())
    if value.startswith((".", "/", "~")):
        raise InvalidArgument(f"argument '{name}': there is no directory {local}")
    return value


def _translated(arguments: Mapping[str, Any], device: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Our settings for these arguments, and the arguments without effect, with the reason. `device` replaces the
    arguments' own.

    Raises:
        InvalidArgument: an argument is wrong, or the model would answer differently without it.
    """
    settings: dict[str, Any] = {}
    idle: dict[str, str] = {}
    for name, value in arguments.items():
        if name in CHANGES_ANSWERS and not asks_for_nothing(name, value):
            raise InvalidArgument(f"argument '{name}' is not served: {CHANGES_ANSWERS[name]}")
        if name == _SPECULATION and (reason := _why_undrafted(value)):
            idle[name] = reason
        elif name in OWN_NAMES:
            settings |= _setting(name, OWN_VALUES.get((name, str(value)), value))
        elif not asks_for_nothing(name, value):
            idle[name] = _reason(name)
    for name in () if settings.get("enable_lora") else settings.keys() & {"max_loras", "max_lora_rank"}:
        del settings[name]
        idle[name] = "enable_lora is not set"
    utilization = "gpu_memory_utilization"
    if utilization in settings and computes_on_host(device or settings.get("device"), usable_gpus()):
        del settings[utilization]
        idle[utilization] = "no GPU computes; the host's is the parameter 'kv_cache_memory_fraction' in config.pbtxt"
    return settings, idle


def _setting(name: str, value: Any) -> dict[str, Any]:
    """The setting of one argument; none where it is null."""
    if value is None:
        return {}
    if isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    try:
        return parse_settings({OWN_NAMES[name]: value}, EngineOptions).given()
    except InvalidArgument as error:
        reason = error.message.partition(f"'{OWN_NAMES[name]}' ")[2]
        raise InvalidArgument(f"argument '{name}' {reason}") from None


def _why_undrafted(value: Any) -> str:
    """Why a `speculative_config` has no effect; empty where our engine drafts so."""
    if value is None:
        return ""
    try:
        read_speculation_config(msgspec.json.encode(value).decode())
    except InvalidArgument as error:
        return f"nothing is drafted, the text is the same: {error.message}"
    return ""


def _reason(name: str) -> str:
    for reasons in (ELSEWHERE, WITHOUT_EFFECT, NOT_SERVED):
        if name in reasons:
            return reasons[name]
    known = ("model", "revision", *OWN_NAMES, *WITHOUT_EFFECT, *NOT_SERVED, *ELSEWHERE)
    return f"not known here{did_you_mean(name, known)}"
