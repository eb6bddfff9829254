"""The defaults that Triton fills into a config before a client sees it.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.

Returns configs with what they lack. Refuses only a config without a backend; config_validation.py checks the others.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.gguf_files import GGUF_SUFFIX
from ..core.model import RawConfig
from ..core.regular_files import read_text
from .backend_registry import (
    ENCODER_BACKEND,
    LANGUAGE_MODEL_BACKEND,
    PIPELINE_BACKEND,
    PYTHON,
    canonical_backend,
    find_native_backend,
    is_composition,
    is_text_backend,
)
from .config_io import complete_fields


class TritonBackend(NamedTuple):
    """A backend with the platform and the model file that go with it: Triton's own, and that of pipelines."""

    backend: str
    platform: str
    filename: str


TRITON_BACKENDS = (
    TritonBackend("tensorrt", "tensorrt_plan", "model.plan"),
    TritonBackend("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    TritonBackend("openvino", "", "model.xml"),
    TritonBackend("openvino", "", "model.onnx"),
    TritonBackend("pytorch", "pytorch_libtorch", "model.pt"),
    TritonBackend("pytorch", "torch_aoti", "model.pt2"),
    TritonBackend("python", "", "model.py"),
    TritonBackend(PIPELINE_BACKEND, "", "pipeline.py"),
    TritonBackend("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    TritonBackend("tensorflow", "tensorflow_graphdef", "model.graphdef"),
)
"""A version's files are tried in this order."""

ENSEMBLE_PLATFORM = "ensemble"

_WITHOUT_FILE = (ENCODER_BACKEND, ENSEMBLE_PLATFORM, "charonia_preprocessing", "charonia_postprocessing")
"""Backends of tensors whose models are not in a file that a config names."""

_ENCODER_CLASS = re.compile(r".*ForSequenceClassification|(?!.*LMHead|MarianMT).*Model|HF_ColBERT")
"""The names of transformers' classes that classify, or give the vectors of a text's tokens, and of ColBERT's own."""

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
"""A config has one of these fields."""

_DEFAULT_SEQUENCE_IDLE_US = 1_000_000


def fill_backend(config: RawConfig, directory: Path) -> RawConfig:
    """The config with `backend`, `platform` and `default_model_filename`: by each other, else by the files of the
    version's `directory`, else by the model's name. Raises `InvalidArgument` if backend and platform contradict each
    other, or nothing tells the backend."""
    name = config["name"]
    platform = config["platform"]
    filename = config["default_model_filename"]
    backend = canonical_backend(config["backend"])
    if backend == PYTHON:
        backend = find_native_backend(config, directory) or backend
    if not backend and not platform:
        backend, platform = _detect_backend(name, directory)
    is_ensemble = "ensemble_scheduling" in config
    if is_ensemble and not {backend, platform} <= {"", ENSEMBLE_PLATFORM}:
        message = f"ensemble scheduling cannot be set for model '{name}' whose platform is {platform or backend}"
        raise InvalidArgument(message, field="ensemble_scheduling")
    if is_ensemble or platform == ENSEMBLE_PLATFORM:
        return {**config, "backend": backend, "platform": ENSEMBLE_PLATFORM}
    backend, platform = _pair_backend_and_platform(backend, platform)
    if not filename and _is_in_a_file(backend):
        filename = _default_filename(backend, platform, directory)
    return {**config, "backend": backend, "platform": platform, "default_model_filename": filename}


def _is_in_a_file(backend: str) -> bool:
    """Whether a version of a backend's models is in one file or folder, which the config names."""
    is_composed = is_composition(backend) and backend != PIPELINE_BACKEND
    return not (is_composed or is_text_backend(backend) or backend in _WITHOUT_FILE)


def detect_checkpoint_backend(directory: Path) -> str:
    """The backend of a checkpoint: encoders are published with modules.json, or classify sequences (by some tokens'
    logits where config.json says so), or have no head."""
    if (directory / "modules.json").is_file():
        return ENCODER_BACKEND
    try:
        config = json.loads(read_text(directory / "config.json"))
        architectures = map(str, config.get("architectures") or ())
        encodes = "classifier_from_token" in config or any(map(_ENCODER_CLASS.fullmatch, architectures))
    except (ValueError, AttributeError, TypeError, OSError, RecursionError, InvalidArgument):
        return LANGUAGE_MODEL_BACKEND  # its load reports the problem
    return ENCODER_BACKEND if encodes else LANGUAGE_MODEL_BACKEND


def has_gguf(directory: Path) -> bool:
    return any(True for _ in directory.glob(f"*{GGUF_SUFFIX}"))


def _detect_backend(name: str, directory: Path) -> tuple[str, str]:
    """Backend and platform of a model that says neither."""
    if (directory / "config.json").is_file() or (directory / "modules.json").is_file() or has_gguf(directory):
        return detect_checkpoint_backend(directory), ""
    for known in TRITON_BACKENDS:
        if (directory / known.filename).exists():
            return known.backend, known.platform
    _, dot, backend = name.rpartition(".")
    if not dot or not backend:
        raise InvalidArgument(
            f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'.",
            field="backend",
        )
    return backend, ""


def _pair_backend_and_platform(backend: str, platform: str) -> tuple[str, str]:
    own = [known for known in TRITON_BACKENDS if known.platform and known.platform == platform]
    if not backend:  # older configs call the backend a platform
        return own[0].backend if own else platform, platform
    if not platform:
        return backend, next((known.platform for known in TRITON_BACKENDS if known.backend == backend), "")
    if own and own[0].backend != backend:
        message = f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
        raise InvalidArgument(message, field="platform")
    return backend, platform


def _default_filename(backend: str, platform: str, directory: Path) -> str:
    files = [known.filename for known in TRITON_BACKENDS if known.backend == backend]
    same = [known.filename for known in TRITON_BACKENDS if known.platform and known.platform == platform]
    present = [file for file in files if (directory / file).exists()]
    if same and (same[0] in present or not present):
        return same[0]
    return (present or files or [f"model.{backend}"])[0]


def fill_defaults(config: RawConfig, gpus: tuple[int, ...], uses_gpus: bool = True) -> RawConfig:
    """The config with all other defaults. `gpus`: those of this machine; `uses_gpus`: the backend can use them."""
    filled = {**config, "version_policy": config.get("version_policy") or {"latest": {"num_versions": 1}}}
    if config["platform"] == ENSEMBLE_PLATFORM or is_composition(config["backend"]):
        return complete_fields(filled)
    if "sequence_batching" in config:
        sequences = config["sequence_batching"]
        idle = sequences["max_sequence_idle_microseconds"] or _DEFAULT_SEQUENCE_IDLE_US
        filled["sequence_batching"] = {**sequences, "max_sequence_idle_microseconds": idle}
        if "oldest" in sequences:
            filled["sequence_batching"]["oldest"] = _with_preferred_size(sequences["oldest"], config)
    if "dynamic_batching" in config:
        filled["dynamic_batching"] = _with_preferred_size(config["dynamic_batching"], config)
    pinned = {"input_pinned_memory": {"enable": True}, "output_pinned_memory": {"enable": True}}
    filled["optimization"] = {**config.get("optimization", {}), **pinned}
    filled["instance_group"] = _fill_instance_groups(config, gpus if uses_gpus else (), gpus)
    return complete_fields(filled)


def _with_preferred_size(batcher: RawConfig, config: RawConfig) -> RawConfig:
    if batcher.get("preferred_batch_size") or config["max_batch_size"] <= 0:
        return batcher
    return {**batcher, "preferred_batch_size": [config["max_batch_size"]]}


def enable_default_batching(config: RawConfig, size_given: bool) -> RawConfig:
    """The config, which batches dynamically if the server found out the batch size, unless it chose a scheduler."""
    if size_given or config["max_batch_size"] <= 1 or any(scheduler in config for scheduler in _SCHEDULERS):
        return config
    return {**config, "dynamic_batching": {}}


def _fill_instance_groups(config: RawConfig, usable: tuple[int, ...], gpus: tuple[int, ...]) -> list[dict[str, Any]]:
    name = config["name"]
    backend = config["backend"]
    groups = []
    for number, group in enumerate(config["instance_group"] or ({"name": name},)):
        kind, devices = group.get("kind", "KIND_AUTO"), group.get("gpus") or []
        if kind == "KIND_AUTO" and is_text_backend(backend):
            kind = "KIND_MODEL"
        elif kind == "KIND_AUTO":  # a GPU wherever there is one that the backend can use, as Triton
            kind = "KIND_GPU" if usable and set(devices) <= set(usable) else "KIND_CPU"
        if kind == "KIND_GPU":
            devices = devices or list(gpus)
        count = group.get("count") or (2 if kind == "KIND_CPU" and backend == "onnxruntime" else 1)
        named = group["name"] or f"{name}_{number}"
        groups.append({**group, "name": named, "kind": kind, "gpus": devices, "count": count})
    return groups
