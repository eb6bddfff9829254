"""`triton_python_backend_utils`, as a `model.py` imports it: tensors, requests, responses, senders, calls to other
models, logs, metrics, and the config that a model may complete.

The interface is that of https://github.com/triton-inference-server/python_backend#readme. A leading underscore, or no
place in `__all__`, marks what models should not use.
"""

from __future__ import annotations

import logging
import sys
import weakref
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Sequence

from .connection import TritonError, TritonModelException, server
from .messages import LogMessage, UpdateMetric, bounded_text
from .request import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    ResponseIterator,
)
from .response import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse, InferenceResponseSender
from .tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)


class LogLevel(Enum):
    """`value`: the number that Python's `logging` has for it."""

    INFO, WARNING, ERROR, VERBOSE = logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG


def _log(level: int, message: str, frames: int = 1) -> None:
    """`frames`: between this function's and that of the code that logs."""
    if message is None:
        raise TypeError("the message for the log must be a str, not None")
    caller = sys._getframe(frames)
    source = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    text = bounded_text(str(message))
    if server().forked:
        print(f"{source}: {text}", file=sys.stderr)
    else:
        server().send(LogMessage(level, text, source))


class Logger:
    """Writes to the server's log."""

    INFO, WARNING, ERROR, VERBOSE = LogLevel.INFO, LogLevel.WARNING, LogLevel.ERROR, LogLevel.VERBOSE

    log_info = staticmethod(partial(_log, logging.INFO))
    log_warn = staticmethod(partial(_log, logging.WARNING))
    log_error = staticmethod(partial(_log, logging.ERROR))
    log_verbose = staticmethod(partial(_log, logging.DEBUG))

    @staticmethod
    def log(message: str, level: LogLevel = INFO) -> None:
        if not isinstance(level, LogLevel):
            raise TypeError(f"a level of the logger is INFO, WARNING, ERROR or VERBOSE, not {level!r}")
        _log(level.value, message, frames=2)


class Metric:
    """One series of a family, as long as the family's object is there: `increment` of counters and gauges, `set` of
    gauges, `observe` of histograms."""

    def __init__(self, family: MetricFamily, labels: dict[str, str] | None, buckets: list[float] | None) -> None:
        self._kind = family._kind
        self._removed = False
        texts = {str(name): str(value) for name, value in (labels or {}).items()}
        self._id: int = server().call("add_metric", family=family._name, labels=texts, buckets=buckets)

    def increment(self, value: float) -> None:
        self._require("increment", MetricFamily.COUNTER, MetricFamily.GAUGE)
        if self._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("A counter cannot be incremented by a negative value.")
        self._update("increment", value)

    def set(self, value: float) -> None:
        self._require("set", MetricFamily.GAUGE)
        self._update("set", value)

    def observe(self, value: float) -> None:
        self._require("observe", MetricFamily.HISTOGRAM)
        self._update("observe", value)

    def value(self) -> float:
        self._require("get", MetricFamily.COUNTER, MetricFamily.GAUGE)
        return float(server().call("metric_value", metric=self._id))

    def _require(self, operation: str, *kinds: int) -> None:
        if self._removed:
            raise TritonModelException(
                f"Failed to {operation} metric value: Invalid metric operation as the corresponding 'MetricFamily' has "
                "been deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects "
                "have been deleted."
            )
        if self._kind not in kinds:
            raise TritonModelException(
                f"Failed to {operation} metric value: a {_KINDS[self._kind]} has no such operation."
            )

    def _update(self, operation: str, value: float) -> None:
        server().send(UpdateMetric(self._id, operation, float(value)))

    def _remove(self) -> None:
        """Remove the series, unless other metrics stand for it."""
        if self._removed or not hasattr(self, "_id"):
            return
        self._removed = True
        with suppress(OSError):  # the connection is closed, and this process ends
            server().send(UpdateMetric(self._id, "remove", 0.0))

    def __del__(self) -> None:
        self._remove()


class MetricFamily:
    """Metrics of one name; `Metric` makes the series, which go when this object does. Families of one name and kind are
    one, in all models."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        if kind not in _KINDS:
            raise TritonModelException(f"{kind} is no kind of metric")
        self._name = name
        self._kind = kind
        self._metrics: weakref.WeakSet[Metric] = weakref.WeakSet()
        server().call("add_metric_family", name=name, description=description, kind=_KINDS[kind])

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        if not (labels is None or isinstance(labels, dict)):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is None and self._kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if not (buckets is None or isinstance(buckets, list)):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and self._kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        metric = Metric(self, labels, buckets)
        self._metrics.add(metric)
        return metric

    def __del__(self) -> None:
        for metric in getattr(self, "_metrics", ()):
            metric._remove()


_KINDS = {MetricFamily.COUNTER: "counter", MetricFamily.GAUGE: "gauge", MetricFamily.HISTOGRAM: "histogram"}


class ModelConfig:
    """A model's config with the methods that complete it. What the config file says wins: a contradiction raises."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises `ValueError` if the config file has a larger one."""
        declared = self._config.get("max_batch_size", 0)
        if declared > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {declared}, but in auto_complete_config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Batch requests. Raises `ValueError` if the config file has chosen another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto_complete_config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        for name in transaction_policy_dict:
            if name != "decoupled":
                raise ValueError(
                    f"model transaction property in auto_complete_config function for model '{self._name}' contains "
                    "property other than 'decoupled'."
                )
        if "decoupled" not in transaction_policy_dict:
            raise ValueError(
                f"model transaction property in auto_complete_config function for model '{self._name}' is missing "
                "'decoupled' property"
            )
        decoupled = transaction_policy_dict["decoupled"]
        declared = self._config.get("model_transaction_policy", {}).get("decoupled")
        if declared and not decoupled:
            raise ValueError(
                "transaction policy conflict: configuration has 'decoupled' as true, but in auto_complete_config "
                f"function for model '{self._name}' it is false"
            )
        self._config["model_transaction_policy"] = {"decoupled": bool(decoupled)}

    # The parameters bear the names that Triton's have: models may pass them by name.
    def add_input(self, input: dict[str, Any]) -> None:
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        self._add("output", output, ("name", "data_type", "dims"))

    @property
    def _name(self) -> str:
        return str(self._config.get("name", ""))

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        """Add a tensor, or what the config file leaves out of it."""
        where = f"in auto_complete_config function for model '{self._name}'"
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        name = tensor["name"]
        if any(key not in allowed for key in tensor):
            others = ", ".join(f"'{key}'" for key in allowed[:-1])
            raise ValueError(f"{kind} '{name}' {where} contains property other than {others} and '{allowed[-1]}'.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{name}' {where} is missing '{key}' property.")
        declared = next((entry for entry in self._config.setdefault(kind, []) if entry["name"] == name), None)
        if declared is None:
            self._config[kind].append(tensor)
            return
        if declared.get("data_type", "TYPE_INVALID") not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {declared['data_type']} for "
                f"{kind} '{name}', model provides {tensor['data_type']}"
            )
        dims = [int(size) for size in declared.get("dims", ())]
        if dims and dims != [int(size) for size in tensor["dims"]]:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects dims {tensor['dims']} but the model "
                f"configuration specifies dims {declared['dims']}"
            )
        if "optional" in declared and bool(declared["optional"]) != bool(tensor.get("optional", declared["optional"])):
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects optional {tensor['optional']} but the model "
                f"configuration specifies optional {declared['optional']}"
            )
        declared.update(tensor)


__all__ = ["InferenceRequest", "InferenceTrace", "PreferredMemory", "ResponseIterator", "is_model_ready"]
__all__ += ["InferenceResponse", "InferenceResponseSender", "TritonError", "TritonModelException"]
__all__ += ["Logger", "Metric", "MetricFamily", "ModelConfig", "get_model_dir", "load_model", "unload_model"]
__all__ += ["Tensor", "get_input_tensor_by_name", "get_output_tensor_by_name"]
__all__ += ["TRITON_STRING_TO_NUMPY", "deserialize_bytes_tensor", "serialize_byte_tensor", "triton_string_to_numpy"]
__all__ += ["numpy_to_triton_type", "triton_to_numpy_type"]
__all__ += ["get_input_config_by_name", "get_output_config_by_name", "using_decoupled_model_transaction_policy"]
__all__ += ["TRITONSERVER_MEMORY_CPU", "TRITONSERVER_MEMORY_GPU", "TRITONSERVER_RESPONSE_COMPLETE_FINAL"]
__all__ += ["TRITONSERVER_REQUEST_FLAG_SEQUENCE_END", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START"]
__all__ += ["TRITONSERVER_REQUEST_RELEASE_ALL", "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2

_model_directory = ""


def set_model_directory(directory: str) -> None:
    """Set what `get_model_dir` returns."""
    global _model_directory
    _model_directory = directory


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return _find(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    if inference_response._error is not None:
        raise TritonModelException(inference_response._error.message())
    return _find(inference_response.output_tensors(), name)


def _find(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor._name == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((entry for entry in model_config.get("input", ()) if entry["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((entry for entry in model_config.get("output", ()) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The directory of the model's version."""
    return _model_directory


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model of the server's repositories, where the server was started with explicit model control. The paths of
    `files` may begin with `file:`, as in a load request."""
    encoded = {path[len("file:") * path.startswith("file:") :]: data.hex() for path, data in (files or {}).items()}
    server().call("load_model", name=model_name, config=config, files=encoded)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    server().call("unload_model", name=model_name, dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    return bool(server().call("is_model_ready", name=model_name, version=str(model_version)))
