"""The fields of a config that have no effect here: refused where answers would differ, otherwise logged.

Knows nothing of how a backend computes; parameters are each backend's own business.
"""

from collections.abc import Iterator, Sequence

from ..core.errors import Unsupported
from ..core.model import RawConfig
from .config_defaults import LANGUAGE_MODEL_BACKENDS
from .config_io import ConfigMessage

_REFUSED = {
    "model_repository_agents": "repository agents are not run",
    "model_operations": "operator libraries are not loaded",
}
"""Fields that change a model's answers, with the reason why they are refused."""

_IGNORED = ("runtime", "cc_model_filenames")
_IGNORED_OPTIMIZATION = ("priority", "cuda", "gather_kernel_buffer_threshold", "eager_batching")
_ONNX_OPTIMIZATION = ("graph", "execution_accelerators")
"""Of `optimization`."""

_DECOUPLED_BACKENDS = ("repeat", "square")
"""Backends of classic models that may make several responses to a request."""

_DECOUPLED = "model_transaction_policy.decoupled"
_IGNORED_GROUP = ("rate_limiter", "profile", "host_policy", "secondary_devices")
_IGNORED_STATE = ("use_same_buffer_for_input_output", "use_growable_memory")
_IGNORED_TENSOR = ("is_shape_tensor", "is_non_linear_format_io")
_CLASSIC_ONLY = (
    "max_batch_size",
    "input",
    "output",
    "batch_input",
    "batch_output",
    "optimization",
    "dynamic_batching",
    "instance_group",
    "model_warmup",
    "model_transaction_policy",
    "default_model_filename",
    "model_metrics",
)


def refuse_unsupported_fields(config: ConfigMessage) -> None:
    """Raises `Unsupported` for a field that changes answers and is not served."""
    for field, reason in _REFUSED.items():
        if config.HasField(field):
            raise Unsupported(f"model '{config.name}' has {field}: {reason} here", field=field)
    if config.backend in LANGUAGE_MODEL_BACKENDS and config.HasField("sequence_batching"):
        message = f"model '{config.name}' has sequence_batching: language models keep no sequences between requests"
        raise Unsupported(message, field="sequence_batching")


def is_response_cache_enabled(config: ConfigMessage) -> bool:
    """The model's answers may be kept, and are to be: it answers each request once, whatever it was asked before."""
    once = not config.model_transaction_policy.decoupled and not config.HasField("sequence_batching")
    return bool(config.response_cache.enable) and once and config.backend not in LANGUAGE_MODEL_BACKENDS


def ignored_fields(config: ConfigMessage, caching: bool = True, made: Sequence[RawConfig] = ()) -> Iterator[str]:
    """The fields of a config, as it was written, that have no effect; by their paths. `caching`: the server has a cache
    of responses. `made`: the whole configs of the versions, where some were made."""
    yield from _fields_set(config, _IGNORED)
    if config.response_cache.enable and not (caching and is_response_cache_enabled(config)):
        yield "response_cache"
    if config.backend in LANGUAGE_MODEL_BACKENDS:
        yield from _fields_set(config, _CLASSIC_ONLY)
        return
    if config.model_transaction_policy.decoupled and config.backend not in _DECOUPLED_BACKENDS:
        yield _DECOUPLED
    of_others = () if config.backend == "onnxruntime" else _ONNX_OPTIMIZATION
    yield from (
        f"optimization.{field}" for field in _fields_set(config.optimization, (*_IGNORED_OPTIMIZATION, *of_others))
    )
    yield from () if of_others else _ignored_accelerators(config, made)
    for group in config.instance_group:
        yield from (f"instance_group.{field}" for field in _fields_set(group, _IGNORED_GROUP))
    for state in config.sequence_batching.state:
        yield from (f"sequence_batching.state.{field}" for field in _fields_set(state, _IGNORED_STATE))
    for side, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield from (f"{side}.{tensor.name}.{field}" for field in _fields_set(tensor, _IGNORED_TENSOR))


def ignored_field_message(path: str) -> str:
    """What there is to say of a field that `ignored_fields` found."""
    if path == _DECOUPLED:
        return f"{path} makes no more of this backend's one response to a request; it may be asked for by streams alone"
    return f"{path} has no effect here"


def _ignored_accelerators(config: ConfigMessage, made: Sequence[RawConfig]) -> Iterator[str]:
    kinds = {group["kind"] for raw in made for group in raw.get("instance_group", ())}
    accelerators = config.optimization.execution_accelerators
    if accelerators.gpu_execution_accelerator and kinds and "KIND_GPU" not in kinds:
        yield "optimization.execution_accelerators.gpu_execution_accelerator"
    if accelerators.cpu_execution_accelerator and kinds == {"KIND_GPU"}:
        yield "optimization.execution_accelerators.cpu_execution_accelerator"


def _fields_set(message: ConfigMessage, fields: tuple[str, ...]) -> Iterator[str]:
    there = {field.name for field, _ in message.ListFields()}
    return (field for field in fields if field in there)
