"""Validation of a completed config, with Triton's messages.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.

Knows nothing of files and of what a backend can do.
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from ..core.errors import InvalidArgument
from .config_io import ConfigMessage

_MAX_INSTANCES = 1024
"""Each has a thread or a process of its own, and is given work by going through all of them."""

_METRIC_TAG = re.compile(r"[a-zA-Z0-9_]+")
"""What makes a label's name after a `_`: Prometheus takes none of the metrics where one of them has another."""


def validate_config(config: ConfigMessage, gpus: tuple[int, ...]) -> None:
    """Raises `InvalidArgument` for the first rule that is broken; `field` says where. `gpus`: there are here."""
    _require(bool(config.name), "name", "model configuration must specify 'name'")
    _require(
        bool(config.backend or config.platform),
        "backend",
        f"must specify 'platform' or 'backend' for {config.name}",
    )
    _require(
        config.max_batch_size >= 0, "max_batch_size", f"'max_batch_size' must be non-negative value for {config.name}"
    )
    _check_versions(config)
    _check_tensors(config, "input", config.input)
    _check_tensors(config, "output", config.output)
    _check_batching(config)
    _check_batch_tensors(config)
    _check_instances(config, gpus)


def validate_written_config(config: ConfigMessage) -> None:
    """The rules that hold before anything reads the model's file or counts its instances: the config is as written.

    A link in the version's directory may lead anywhere: whoever can make it can copy the file there, too.

    Raises:
        InvalidArgument: a rule is broken; `field` says which.
    """
    count = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)
    message = f"model {config.name} has {count} instances, and may have {_MAX_INSTANCES} at most"
    _require(count <= _MAX_INSTANCES, "instance_group.count", message)
    name = config.default_model_filename
    path = PurePosixPath(name)
    holds = not path.is_absolute() and ".." not in path.parts and "\0" not in name
    message = f"'default_model_filename' of {config.name} must stay within the version's directory, got {name!r}"
    _require(holds, "default_model_filename", message)
    for tag in config.metric_tags:
        message = f"'metric_tags' of {config.name} must be named by letters, digits and '_', got {tag!r}"
        _require(_METRIC_TAG.fullmatch(tag) is not None, "metric_tags", message)


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=field)


def _check_versions(config: ConfigMessage) -> None:
    policy = config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "latest":
        message = f"'num_versions' must be at least 1 for {config.name}"
        _require(policy.latest.num_versions >= 1, "version_policy.num_versions", message)
    if kind == "specific":
        message = f"'versions' of the version policy must be 1 or more numbers of at least 1 for {config.name}"
        versions = policy.specific.versions
        _require(bool(versions) and min(versions) >= 1, "version_policy.versions", message)


def _check_tensors(config: ConfigMessage, side: str, tensors: Iterable[ConfigMessage]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        _require(bool(tensor.name), f"{side}.name", f"model {side} must specify 'name' for {config.name}")
        where = f"{side}.{tensor.name}"
        message = f"model {side} '{tensor.name}' is there twice for {config.name}"
        _require(tensor.name not in seen, where, message)
        seen.add(tensor.name)
        message = f"model {side} must specify 'data_type' for {config.name}: '{tensor.name}' does not"
        _require(tensor.data_type != 0, f"{where}.data_type", message)
        _check_shape(config, side, tensor)


def _check_shape(config: ConfigMessage, side: str, tensor: ConfigMessage) -> None:
    where, of = f"{side}.{tensor.name}", f"for {config.name}, '{tensor.name}'"
    _require(bool(tensor.dims), f"{where}.dims", f"model {side} must specify 'dims' {of}")
    message = f"model {side} dimension must be integer >= 1, or -1 to indicate a variable-size dimension {of}"
    _require(all(dim >= 1 or dim == -1 for dim in tensor.dims), f"{where}.dims", message)
    if side == "input" and tensor.format in (1, 2):
        _require(len(tensor.dims) == 3, f"{where}.dims", f"model input NHWC/NCHW require 3 dims {of}")
    if tensor.HasField("reshape"):
        _check_reshape(config, side, tensor, of)


def _check_reshape(config: ConfigMessage, side: str, tensor: ConfigMessage, of: str) -> None:
    where, shape = f"{side}.{tensor.name}.reshape", list(tensor.reshape.shape)
    message = f"model {side} cannot have empty reshape for non-batching model as scalar tensors are not supported {of}"
    _require(bool(shape) or config.max_batch_size > 0, where, message)
    message = f"model {side} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension {of}"
    _require(all(dim >= 1 or dim == -1 for dim in shape), where, message)
    message = f"model {side} has different number of variable-size dimensions for dims and reshape {of}"
    _require(list(tensor.dims).count(-1) == shape.count(-1), where, message)
    message = f"model {side} has different size for dims and reshape {of}"
    _require(_sizes_between_free_dims(tensor.dims) == _sizes_between_free_dims(shape), where, message)


def _sizes_between_free_dims(dims: Iterable[int]) -> list[int]:
    """Elements between one free dimension and the next: each stretch has to keep its own."""
    sizes = [1]
    for dim in dims:
        if dim == -1:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def _check_batching(config: ConfigMessage) -> None:
    if not config.HasField("dynamic_batching"):
        return
    batching, name = config.dynamic_batching, config.name
    field = "dynamic_batching.preferred_batch_size"
    for size in batching.preferred_batch_size:
        _require(size > 0, field, f"dynamic batching preferred size must be positive for {name}")
        message = f"dynamic batching preferred size must be <= max batch size for {name}"
        _require(size <= config.max_batch_size, field, message)
    _check_priorities(config)
    if batching.preserve_ordering:
        message = f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        _require(batching.priority_levels <= 1, "dynamic_batching.priority_levels", message)
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        message = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
        _require(not any(policy.timeout_action == policy.DELAY for policy in policies), "timeout_action", message)


def _check_priorities(config: ConfigMessage) -> None:
    batching, levels = config.dynamic_batching, config.dynamic_batching.priority_levels
    if levels:
        message = f"default priority level must be in range [1, {levels}] for {config.name}"
        holds = 0 < batching.default_priority_level <= levels
        _require(holds, "dynamic_batching.default_priority_level", message)
    for level in batching.priority_queue_policy:
        message = (
            f"priority queue policy must have priority level in range [1, {levels}] for {config.name}, got {level}"
        )
        _require(0 < level <= levels, "dynamic_batching.priority_queue_policy", message)


def _check_batch_tensors(config: ConfigMessage) -> None:
    inputs = {tensor.name for tensor in config.input}
    for field, helpers in (("batch_input", config.batch_input), ("batch_output", config.batch_output)):
        for helper in helpers:
            _require(
                bool(helper.target_name),
                f"{field}.target_name",
                f"{field} must specify 'target_name' for {config.name}",
            )
            missing = [source for source in helper.source_input if source not in inputs]
            message = f"{field} of {config.name} has source input '{', '.join(missing)}', which is no input"
            _require(not missing, f"{field}.source_input", message)


def _check_instances(config: ConfigMessage, gpus: tuple[int, ...]) -> None:
    for group in config.instance_group:
        of = f"instance group {group.name} of model {config.name}"
        _require(group.count > 0, "instance_group.count", f"{of} must have a 'count' of at least 1, got {group.count}")
        if group.kind == group.KIND_GPU:
            _require(bool(gpus), "instance_group.kind", f"{of} has kind KIND_GPU but no GPUs are available")
            absent = [gpu for gpu in group.gpus if gpu not in gpus]
            message = f"{of} specifies invalid or unsupported gpu id {absent[:1]}; there are {list(gpus)}"
            _require(not absent, "instance_group.gpus", message)
        else:
            kind = group.Kind.Name(group.kind)
            message = f"{of} has kind {kind} but specifies one or more GPUs"
            _require(not group.gpus, "instance_group.gpus", message)
