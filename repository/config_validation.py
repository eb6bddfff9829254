"""Validation of a config, with Triton's messages, and the fields that have no effect here: refused or logged.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.

Knows nothing of files and of how a backend computes; parameters are each backend's own business.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from ..core.backends import TextBackend
from ..core.errors import InvalidArgument, Unsupported
from ..core.model import RawConfig
from .backend_registry import PIPELINE_BACKEND, is_composition, is_text_backend, text_backend
from .config_defaults import ENSEMBLE_PLATFORM
from .config_io import v2_datatype

_MAX_INSTANCES = 1024
"""Each has a thread or a process of its own, and work is assigned by going through all of them."""

_METRIC_TAG = re.compile(r"[a-zA-Z0-9_]+")
"""A label's name is made from it by a leading `_`; Prometheus would reject all metrics for an invalid one."""

_REFUSED = {
    "model_repository_agents": "repository agents are not run",
    "model_operations": "operator libraries are not loaded",
}
"""Fields that change a model's answers, with the reason why they are refused."""

_SINGLE_RESPONSE_BACKENDS = (
    "identity",
    "fil",
    "onnxruntime",
    "openvino",
    "pytorch",
    "tensorflow",
    "encoder",
    "charonia_preprocessing",
    "charonia_postprocessing",
)
"""Backends whose models make one response to a request."""

_BY_REQUEST = ("python", "charonia_preprocessing", "charonia_postprocessing")
"""Backends whose models get a batch as the requests that it is of, and so no tensor about all of them."""

_CPU_ONLY = ("fil",)
"""Backends that on a GPU answer as on the CPU, and compute on that."""

_TAKE_SCALARS = ("onnxruntime", "openvino", "pytorch", "tensorflow")
"""Backends whose models may have tensors without dimensions, which a config has as a reshape to none."""

_DECOUPLED = "model_transaction_policy.decoupled"
_BATCH_TENSORS = ("batch_input", "batch_output")
_IGNORED = ("runtime", "cc_model_filenames")
_NO_INSTANCES = (*_BATCH_TENSORS, "optimization", "dynamic_batching", "instance_group", "model_warmup")
_IGNORED_OPTIMIZATION = ("priority", "cuda", "gather_kernel_buffer_threshold", "eager_batching")
_ONNX_OPTIMIZATION = ("graph", "execution_accelerators")
_DEFAULT_PRIORITY = "PRIORITY_DEFAULT"
_IGNORED_GROUP = ("profile", "host_policy", "secondary_devices")
_IGNORED_STATE = ("use_same_buffer_for_input_output", "use_growable_memory")
_IGNORED_ENSEMBLE = (*_BATCH_TENSORS, "default_model_filename")
_IGNORED_TENSOR = ("is_shape_tensor", "is_non_linear_format_io")
_CLASSIC_ONLY = (
    "max_batch_size",
    "input",
    "output",
    *_BATCH_TENSORS,
    "optimization",
    "dynamic_batching",
    "instance_group",
    "model_warmup",
    "model_transaction_policy",
    "default_model_filename",
    "model_metrics",
)


def refuse_unsupported_fields(config: RawConfig) -> None:
    """Raises `Unsupported` for a field that changes answers and is not served."""
    for field, reason in _REFUSED.items():
        if field in config:
            raise Unsupported(f"model '{config['name']}' has {field}: {reason} here", field=field)
    is_pipeline = config["backend"] == PIPELINE_BACKEND
    if (is_pipeline or is_text_backend(config["backend"])) and "sequence_batching" in config:
        kind = "pipelines" if is_pipeline else "language models"
        message = f"model '{config['name']}' has sequence_batching: {kind} keep no sequences between requests"
        raise Unsupported(message, field="sequence_batching")


def is_response_cache_enabled(config: RawConfig) -> bool:
    """Whether the model's responses are to be cached, and may be: one for each request, the same at any time."""
    cacheable = not is_decoupled(config) and "sequence_batching" not in config
    asks = config.get("response_cache", {}).get("enable")
    return bool(asks) and cacheable and not is_text_backend(config["backend"])


def is_decoupled(config: RawConfig) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


def ignored_fields(
    config: RawConfig, caching: bool = True, made: Sequence[RawConfig] = (), limiting: bool = True
) -> Iterator[str]:
    """Paths of the fields of a written config that have no effect. `caching`: the server has a response cache. `made`:
    the completed configs of its versions, as far as there are any. `limiting`: it has a rate limiter."""
    yield from _fields_set(config, _IGNORED)
    if config.get("response_cache", {}).get("enable") and not (caching and is_response_cache_enabled(config)):
        yield "response_cache"
    if (backend := text_backend(config["backend"])) is not None:
        yield from (field for field in _fields_set(config, _CLASSIC_ONLY) if not _holds_anyway(backend, config, field))
        return
    if config["platform"] == ENSEMBLE_PLATFORM:
        yield from _fields_set(config, _IGNORED_ENSEMBLE)
    if is_composition(config["backend"]):
        yield from _fields_set(config, _NO_INSTANCES)
        return
    if is_decoupled(config) and config["backend"] in _SINGLE_RESPONSE_BACKENDS:
        yield _DECOUPLED
    if config["backend"] in _BY_REQUEST:
        yield from _fields_set(config, _BATCH_TENSORS)
    onnx, optimization = config["backend"] == "onnxruntime", config.get("optimization", {})
    ignored = _IGNORED_OPTIMIZATION if onnx else (*_IGNORED_OPTIMIZATION, *_ONNX_OPTIMIZATION)
    yield from _fields_set(optimization, ignored, "optimization.")
    if onnx:
        kinds = {group["kind"] for raw in made for group in raw.get("instance_group", ())}
        accelerators = optimization.get("execution_accelerators", {})
        if accelerators.get("gpu_execution_accelerator") and kinds and "KIND_GPU" not in kinds:
            yield "optimization.execution_accelerators.gpu_execution_accelerator"
        if accelerators.get("cpu_execution_accelerator") and kinds == {"KIND_GPU"}:
            yield "optimization.execution_accelerators.cpu_execution_accelerator"
    for group in config["instance_group"]:
        if config["backend"] in _CPU_ONLY and group["kind"] == "KIND_GPU":
            yield "instance_group.kind"
        yield from _fields_set(group, _IGNORED_GROUP, "instance_group.")
        yield from () if limiting else _fields_set(group, ("rate_limiter",), "instance_group.")
    for state in config.get("sequence_batching", {}).get("state", ()):
        yield from _fields_set(state, _IGNORED_STATE, "sequence_batching.state.")
    for side in ("input", "output"):
        for tensor in config[side]:
            yield from _fields_set(tensor, _IGNORED_TENSOR, f"{side}.{tensor['name']}.")


def _holds_anyway(backend: TextBackend, config: RawConfig, field: str) -> bool:
    """Whether a language model is as this field of its config says, which Triton's backends for them write out."""
    if backend.written_tensors == "served" and config["input"]:
        if field == "instance_group":
            return all(group["count"] <= 1 for group in config["instance_group"])
        return field in ("input", "output", "max_batch_size", "model_transaction_policy")
    if field == "model_transaction_policy":
        return is_decoupled(config)
    if field == "instance_group":
        [group, *others] = config["instance_group"]
        return not others and group["count"] <= 1 and group["kind"] in ("KIND_AUTO", "KIND_MODEL")
    return field in ("input", "output") and backend.written_tensors == "implied"


def _fields_set(message: RawConfig, fields: Sequence[str], prefix: str = "") -> list[str]:
    return [prefix + field for field in fields if message.get(field) and message[field] != _DEFAULT_PRIORITY]


def ignored_field_message(path: str) -> str:
    """The message about a field that `ignored_fields` found."""
    if path == _DECOUPLED:
        return f"{path} makes no more of this backend's one response to a request; it may be asked for by streams alone"
    return f"{path} has no effect here"


def validate_written_config(config: RawConfig) -> None:
    """Check the rules for a config as it is written: they hold before the model's file is read and instances counted.

    A link in the version's directory may lead anywhere: its creator could have copied the file there, too. Raises
    `InvalidArgument` if a rule is broken; `field` says which.
    """
    count = sum(max(group["count"], 1) * max(len(group["gpus"]), 1) for group in config["instance_group"])
    message = f"model {config['name']} has {count} instances, and may have {_MAX_INSTANCES} at most"
    _require(count <= _MAX_INSTANCES, "instance_group.count", message)
    name = config["default_model_filename"]
    path = PurePosixPath(name)
    holds = not path.is_absolute() and ".." not in path.parts and "\0" not in name
    message = f"'default_model_filename' of {config['name']} must stay within the version's directory, got {name!r}"
    _require(holds, "default_model_filename", message)
    for tag in config["metric_tags"]:
        message = f"'metric_tags' of {config['name']} must be named by letters, digits and '_', got {tag!r}"
        _require(_METRIC_TAG.fullmatch(tag) is not None, "metric_tags", message)


def validate_config(config: RawConfig, gpus: tuple[int, ...]) -> None:
    """Check a completed config, for a machine with these `gpus`. Raises `InvalidArgument` if a rule is broken; `field`
    says which."""
    name, policy = config["name"], config.get("version_policy", {})
    _require(bool(name), "name", "model configuration must specify 'name'")
    message = f"must specify 'platform' or 'backend' for {name}"
    _require(bool(config["backend"] or config["platform"]), "backend", message)
    message = f"'max_batch_size' must be non-negative value for {name}"
    _require(config["max_batch_size"] >= 0, "max_batch_size", message)
    if "latest" in policy:
        message = f"'num_versions' must be at least 1 for {name}"
        _require(policy["latest"]["num_versions"] >= 1, "version_policy.num_versions", message)
    if "specific" in policy:
        versions = policy["specific"]["versions"]
        message = f"'versions' of the version policy must be 1 or more numbers of at least 1 for {name}"
        _require(bool(versions) and min(versions) >= 1, "version_policy.versions", message)
    _check_tensors(config, "input")
    _check_tensors(config, "output")
    if "dynamic_batching" in config:
        _check_batching(config)
    _check_batch_tensors(config)
    if config["platform"] == ENSEMBLE_PLATFORM:
        _check_ensemble(config)
    _check_instances(config, gpus)
    if "openai" in config["parameters"]:
        _check_openai(config)


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=field)


def _check_tensors(config: RawConfig, side: str) -> None:
    model, seen = config["name"], set[str]()
    for tensor in config[side]:
        name, dims = tensor["name"], tensor["dims"]
        _require(bool(name), f"{side}.name", f"model {side} must specify 'name' for {model}")
        where, of = f"{side}.{name}", f"for {model}, '{name}'"
        _require(name not in seen, where, f"model {side} '{name}' is there twice for {model}")
        seen.add(name)
        message = f"model {side} must specify 'data_type' for {model}: '{name}' does not"
        _require(tensor["data_type"] != "TYPE_INVALID", f"{where}.data_type", message)
        _require(bool(dims), f"{where}.dims", f"model {side} must specify 'dims' {of}")
        message = f"model {side} dimension must be integer >= 1, or -1 to indicate a variable-size dimension {of}"
        _require(all(dim >= 1 or dim == -1 for dim in dims), f"{where}.dims", message)
        if side == "input" and tensor["format"] in ("FORMAT_NHWC", "FORMAT_NCHW"):
            _require(len(dims) == 3, f"{where}.dims", f"model input NHWC/NCHW require 3 dims {of}")
        if "reshape" in tensor:
            _check_reshape(config, side, tensor, of)


def _check_reshape(config: RawConfig, side: str, tensor: RawConfig, of: str) -> None:
    where = f"{side}.{tensor['name']}.reshape"
    dims = tensor["dims"]
    shape = tensor["reshape"]["shape"]
    message = f"model {side} cannot have empty reshape for non-batching model as scalar tensors are not supported {of}"
    scalar = config["max_batch_size"] > 0 or config["backend"] in _TAKE_SCALARS
    _require(bool(shape) or scalar, where, message)
    message = f"model {side} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension {of}"
    _require(all(dim >= 1 or dim == -1 for dim in shape), where, message)
    message = f"model {side} has different number of variable-size dimensions for dims and reshape {of}"
    _require(dims.count(-1) == shape.count(-1), where, message)
    message = f"model {side} has different size for dims and reshape {of}"
    _require(_sizes_between_free_dims(dims) == _sizes_between_free_dims(shape), where, message)


def _sizes_between_free_dims(dims: Iterable[int]) -> list[int]:
    """Elements between one free dimension and the next: a reshape keeps each of these sizes."""
    sizes = [1]
    for dim in dims:
        if dim == -1:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def _check_batching(config: RawConfig) -> None:
    batching, name = config["dynamic_batching"], config["name"]
    levels = batching["priority_levels"]
    field = "dynamic_batching.preferred_batch_size"
    for size in batching["preferred_batch_size"]:
        _require(size > 0, field, f"dynamic batching preferred size must be positive for {name}")
        message = f"dynamic batching preferred size must be <= max batch size for {name}"
        _require(size <= config["max_batch_size"], field, message)
    if levels:
        message = f"default priority level must be in range [1, {levels}] for {name}"
        holds = 0 < batching["default_priority_level"] <= levels
        _require(holds, "dynamic_batching.default_priority_level", message)
    for level in map(int, batching["priority_queue_policy"]):
        message = f"priority queue policy must have priority level in range [1, {levels}] for {name}, got {level}"
        _require(0 < level <= levels, "dynamic_batching.priority_queue_policy", message)
    if batching["preserve_ordering"]:
        message = f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        _require(levels <= 1, "dynamic_batching.priority_levels", message)
        policies = [batching.get("default_queue_policy", {}), *batching["priority_queue_policy"].values()]
        message = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
        _require(not any(policy.get("timeout_action") == "DELAY" for policy in policies), "timeout_action", message)


def _check_batch_tensors(config: RawConfig) -> None:
    inputs = {tensor["name"] for tensor in config["input"]}
    for field in ("batch_input", "batch_output"):
        for tensor in config[field]:
            message = f"{field} must specify 'target_name' for {config['name']}"
            _require(bool(tensor["target_name"]), f"{field}.target_name", message)
            missing = [source for source in tensor["source_input"] if source not in inputs]
            message = f"{field} of {config['name']} has source input '{', '.join(missing)}', which is no input"
            _require(not missing, f"{field}.source_input", message)


def _check_instances(config: RawConfig, gpus: tuple[int, ...]) -> None:
    for group in config["instance_group"]:
        of = f"instance group {group['name']} of model {config['name']}"
        count = group["count"]
        kind = group["kind"]
        _require(count > 0, "instance_group.count", f"{of} must have a 'count' of at least 1, got {count}")
        if kind == "KIND_GPU":
            _require(bool(gpus), "instance_group.kind", f"{of} has kind KIND_GPU but no GPUs are available")
            absent = [gpu for gpu in group["gpus"] if gpu not in gpus]
            message = f"{of} specifies invalid or unsupported gpu id {absent[:1]}; there are {list(gpus)}"
            _require(not absent, "instance_group.gpus", message)
        else:
            message = f"{of} has kind {kind} but specifies one or more GPUs"
            _require(not group["gpus"], "instance_group.gpus", message)


def _check_ensemble(config: RawConfig) -> None:
    """Check that an ensemble asks for nothing that only a model with code of its own can have."""
    name = config["name"]
    message = f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE_PLATFORM}"
    _require("ensemble_scheduling" in config, "ensemble_scheduling", message)
    message = f"instance group should not be specified for ensemble '{name}'"
    _require(not config["instance_group"], "instance_group", message)
    message = f"optimization should not be specified for ensemble '{name}'"
    _require("optimization" not in config, "optimization", message)
    message = f"model_warmup can not be specified for ensemble '{name}'"
    _require(not config["model_warmup"], "model_warmup", message)
    for side in ("input", "output"):
        for tensor in config[side]:
            message = f"{side} '{tensor['name']}' of ensemble '{name}' can not have 'reshape': set it in a step's model"
            _require("reshape" not in tensor, f"{side}.{tensor['name']}.reshape", message)


def _check_openai(config: RawConfig) -> None:
    """Check that a model has the tensors of the endpoint of OpenAI's that it is to serve."""
    name, api = config["name"], config["parameters"]["openai"]["string_value"]
    message = f"parameter 'openai' of {name} must be 'chat' or 'completions', got '{api}'"
    _require(api in ("chat", "completions"), "parameters.openai", message)
    texts = [
        {tensor["name"] for tensor in config[side] if v2_datatype(tensor) == "BYTES"} for side in ("input", "output")
    ]
    message = f"{name} has the parameter 'openai', but no output 'text_output' of TYPE_STRING"
    _require("text_output" in texts[1], "output", message)
    takes = ("messages", "text_input") if api == "chat" else ("text_input",)
    wanted = " or ".join(f"'{kind}'" for kind in takes)
    message = f"{name} has the parameter 'openai' of '{api}', but no input {wanted} of TYPE_STRING"
    _require(not texts[0].isdisjoint(takes), "input", message)
