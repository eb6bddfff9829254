"""The defaults that Triton fills into a config before a client sees it.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.

Changes the message in place. Refuses only a config without a backend; config_validation.py checks the others.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from ..core.errors import InvalidArgument
from ..core.gguf_files import GGUF_SUFFIX
from ..core.regular_files import read_text
from .backend_registry import (
    ENCODER_BACKEND,
    LANGUAGE_MODEL_BACKEND,
    PIPELINE_BACKEND,
    find_native_backend,
    is_composition,
    is_text_backend,
)
from .config_io import ConfigMessage, config_to_json


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

_ENCODER_CLASS = re.compile(r".*ForSequenceClassification|(?!.*LMHead).*Model")
"""The names of transformers' classes that classify, or give the vectors of a text's tokens."""

_DEFAULT_SEQUENCE_IDLE_US = 1_000_000
_ALIASES = {"tensorrt-llm": "tensorrtllm"}


def fill_backend(config: ConfigMessage, directory: Path) -> None:
    """Fill in `backend`, `platform` and `default_model_filename`: by each other, else by the files of the version's
    `directory`, else by the model's name. Raises `InvalidArgument` if backend and platform contradict each other, or
    nothing tells the backend."""
    config.backend = canonical_backend(config.backend)
    if config.backend == "python":
        config.backend = find_native_backend(config_to_json(config), directory) or config.backend
    if not config.backend and not config.platform:
        _detect_backend(config, directory)
    if config.HasField("ensemble_scheduling") and not {config.backend, config.platform} <= {"", ENSEMBLE_PLATFORM}:
        platform = config.platform or config.backend
        message = f"ensemble scheduling cannot be set for model '{config.name}' whose platform is {platform}"
        raise InvalidArgument(message, field="ensemble_scheduling")
    if config.platform == ENSEMBLE_PLATFORM or config.HasField("ensemble_scheduling"):
        config.platform = ENSEMBLE_PLATFORM
        return
    _pair_backend_and_platform(config)
    if not config.default_model_filename and _is_in_a_file(config.backend):
        config.default_model_filename = _default_filename(config, directory)


def _is_in_a_file(backend: str) -> bool:
    """Whether a version of a backend's models is in one file or folder, which the config names."""
    is_composed = is_composition(backend) and backend != PIPELINE_BACKEND
    return not (is_composed or is_text_backend(backend) or backend in _WITHOUT_FILE)


def canonical_backend(backend: str) -> str:
    """The name of a backend that may be given by an alias."""
    return _ALIASES.get(backend, backend)


def detect_checkpoint_backend(directory: Path) -> str:
    """The backend of a checkpoint: encoders are published with modules.json, or classify sequences, or have no head."""
    if (directory / "modules.json").is_file():
        return ENCODER_BACKEND
    try:
        config = json.loads(read_text(directory / "config.json"))
        architectures = [str(each) for each in config.get("architectures") or ()]
    except (ValueError, AttributeError, TypeError, OSError, RecursionError, InvalidArgument):
        return LANGUAGE_MODEL_BACKEND  # its load reports the problem
    encodes = any(_ENCODER_CLASS.fullmatch(each) for each in architectures)
    return ENCODER_BACKEND if encodes else LANGUAGE_MODEL_BACKEND


def has_gguf(directory: Path) -> bool:
    return any(True for _ in directory.glob(f"*{GGUF_SUFFIX}"))


def _detect_backend(config: ConfigMessage, directory: Path) -> None:
    if (directory / "config.json").is_file() or (directory / "modules.json").is_file() or has_gguf(directory):
        config.backend = detect_checkpoint_backend(directory)
        return
    for each in TRITON_BACKENDS:
        if (directory / each.filename).exists():
            config.backend, config.platform = each.backend, each.platform
            return
    _, dot, config.backend = config.name.rpartition(".")
    if not dot or not config.backend:
        raise InvalidArgument(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'.",
            field="backend",
        )


def _pair_backend_and_platform(config: ConfigMessage) -> None:
    own = [each for each in TRITON_BACKENDS if each.platform and each.platform == config.platform]
    if not config.backend:
        # Older configs call the backend a platform.
        config.backend = own[0].backend if own else config.platform
        return
    theirs = [each for each in TRITON_BACKENDS if each.backend == config.backend]
    if not config.platform:
        config.platform = theirs[0].platform if theirs else ""
    elif own and own[0].backend != config.backend:
        message = f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}"
        raise InvalidArgument(message, field="platform")


def _default_filename(config: ConfigMessage, directory: Path) -> str:
    files = [each.filename for each in TRITON_BACKENDS if each.backend == config.backend]
    same = [each.filename for each in TRITON_BACKENDS if each.platform and each.platform == config.platform]
    present = [file for file in files if (directory / file).exists()]
    if same and (same[0] in present or not present):
        return same[0]
    return (present or files or [f"model.{config.backend}"])[0]


def fill_defaults(config: ConfigMessage, gpus: tuple[int, ...], uses_gpus: bool = True) -> None:
    """Fill in all other defaults. `gpus`: those of this machine; `uses_gpus`: the backend can use them."""
    if not config.version_policy.WhichOneof("policy_choice"):
        config.version_policy.latest.num_versions = 1
    if config.platform == ENSEMBLE_PLATFORM or is_composition(config.backend):
        return
    sequences = config.sequence_batching
    if config.HasField("sequence_batching"):
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or _DEFAULT_SEQUENCE_IDLE_US
    for message, field in ((config, "dynamic_batching"), (sequences, "oldest")):
        batcher = getattr(message, field)
        if message.HasField(field) and config.max_batch_size > 0 and not batcher.preferred_batch_size:
            batcher.preferred_batch_size.append(config.max_batch_size)
    for buffer in (config.optimization.input_pinned_memory, config.optimization.output_pinned_memory):
        buffer.enable = buffer.enable or not buffer.ListFields()
    _fill_instance_groups(config, gpus if uses_gpus else (), gpus)


def enable_default_batching(config: ConfigMessage, size_given: bool) -> None:
    """Batch dynamically if the server found out the batch size, unless the config chose a scheduler."""
    if not size_given and config.max_batch_size > 1 and not config.WhichOneof("scheduling_choice"):
        config.dynamic_batching.SetInParent()


def _fill_instance_groups(config: ConfigMessage, usable: tuple[int, ...], gpus: tuple[int, ...]) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for number, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{number}"
        if group.kind == group.KIND_AUTO and is_text_backend(config.backend):
            group.kind = group.KIND_MODEL
        elif group.kind == group.KIND_AUTO:  # a GPU wherever there is one that the backend can use, as Triton
            group.kind = group.KIND_GPU if usable and set(group.gpus) <= set(usable) else group.KIND_CPU
        if group.kind == group.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)
        if not group.count:
            group.count = 2 if group.kind == group.KIND_CPU and config.backend == "onnxruntime" else 1
