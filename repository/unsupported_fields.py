"""Which fields of a config do nothing here: refused where the model would answer otherwise, named in the log else.

Knows nothing of how a backend computes; parameters are each backend's own business.
"""

from collections.abc import Iterator, Sequence

from ..core.errors import Unsupported
from ..core.model import Document
from .config_defaults import LANGUAGE_MODELS
from .config_io import Config

_REFUSED = {
    "model_repository_agents": "repository agents are not run",
    "model_operations": "operator libraries are not loaded",
}
"""What changes the answers, so that a model without it would be another."""

_IDLE = ("runtime", "cc_model_filenames")
_IDLE_OPTIMIZATION = ("priority", "cuda", "gather_kernel_buffer_threshold", "eager_batching")
_OF_ONNX = ("graph", "execution_accelerators")
"""Of `optimization`."""

_STREAMING = ("repeat", "square")
"""Backends of classic models that may make several responses to a request."""

_DECOUPLED = "model_transaction_policy.decoupled"
_IDLE_GROUP = ("rate_limiter", "profile", "host_policy", "secondary_devices")
_IDLE_STATE = ("use_same_buffer_for_input_output", "use_growable_memory")
_IDLE_TENSOR = ("is_shape_tensor", "is_non_linear_format_io")
_OF_CLASSIC_MODELS = (
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


def refuse_unserved(config: Config) -> None:
    """Raises `Unsupported` for what cannot be left out."""
    for field, reason in _REFUSED.items():
        if config.HasField(field):
            raise Unsupported(f"model '{config.name}' has {field}: {reason} here", field=field)
    if config.backend in LANGUAGE_MODELS and config.HasField("sequence_batching"):
        message = f"model '{config.name}' has sequence_batching: language models keep no sequences between requests"
        raise Unsupported(message, field="sequence_batching")


def caches(config: Config) -> bool:
    """The model's answers may be kept, and are to be: it answers each request once, whatever it was asked before."""
    once = not config.model_transaction_policy.decoupled and not config.HasField("sequence_batching")
    return bool(config.response_cache.enable) and once and config.backend not in LANGUAGE_MODELS


def idle_fields(config: Config, caching: bool = True, made: Sequence[Document] = ()) -> Iterator[str]:
    """The fields of a config, as it was written, that have no effect; by their paths. `caching`: the server has a cache
    of responses. `made`: the whole configs of the versions, where some were made."""
    yield from _set(config, _IDLE)
    if config.response_cache.enable and not (caching and caches(config)):
        yield "response_cache"
    if config.backend in LANGUAGE_MODELS:
        yield from _set(config, _OF_CLASSIC_MODELS)
        return
    if config.model_transaction_policy.decoupled and config.backend not in _STREAMING:
        yield _DECOUPLED
    of_others = () if config.backend == "onnxruntime" else _OF_ONNX
    yield from (f"optimization.{field}" for field in _set(config.optimization, (*_IDLE_OPTIMIZATION, *of_others)))
    yield from () if of_others else _idle_accelerators(config, made)
    for group in config.instance_group:
        yield from (f"instance_group.{field}" for field in _set(group, _IDLE_GROUP))
    for state in config.sequence_batching.state:
        yield from (f"sequence_batching.state.{field}" for field in _set(state, _IDLE_STATE))
    for side, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield from (f"{side}.{tensor.name}.{field}" for field in _set(tensor, _IDLE_TENSOR))


def idleness(path: str) -> str:
    """What there is to say of a field that `idle_fields` found."""
    if path == _DECOUPLED:
        return f"{path} makes no more of this backend's one response to a request; it may be asked for by streams alone"
    return f"{path} has no effect here"


def _idle_accelerators(config: Config, made: Sequence[Document]) -> Iterator[str]:
    kinds = {group["kind"] for document in made for group in document.get("instance_group", ())}
    accelerators = config.optimization.execution_accelerators
    if accelerators.gpu_execution_accelerator and kinds and "KIND_GPU" not in kinds:
        yield "optimization.execution_accelerators.gpu_execution_accelerator"
    if accelerators.cpu_execution_accelerator and kinds == {"KIND_GPU"}:
        yield "optimization.execution_accelerators.cpu_execution_accelerator"


def _set(message: Config, fields: tuple[str, ...]) -> Iterator[str]:
    there = {field.name for field, _ in message.ListFields()}
    return (field for field in fields if field in there)
