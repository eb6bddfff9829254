"""Conversion between a config message and `core.model.ModelConfig`."""

import time
from dataclasses import replace
from pathlib import Path

from ..core.model import ModelConfig
from ..core.tensor import TensorSpec
from .config_defaults import fill_defaults
from .config_io import ConfigMessage, config_from_json, config_to_json, v2_datatype
from .model_files import read_label_files


def to_model_config(config: ConfigMessage, version: str, directory: Path | None = None) -> ModelConfig:
    """The model config of a completed config message; label files are read from the model's `directory`.

    Raises:
        InvalidArgument: a label file cannot be read.
    """
    return ModelConfig(
        config.name,
        version,
        config.backend or config.platform,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        decoupled=config.model_transaction_policy.decoupled,
        inputs=tuple(_spec(tensor, tensor.optional) for tensor in config.input),
        outputs=tuple(_spec(tensor) for tensor in config.output),
        parameters={key: config.parameters[key].string_value for key in sorted(config.parameters)},
        created=int(time.time()),
        raw=config_to_json(config),
        labels={} if directory is None else read_label_files(config, directory),
    )


def with_config_defaults(model: ModelConfig, config: ConfigMessage) -> ModelConfig:
    """The config of a model that makes its own, completed with the config that it was loaded by; its own wins."""
    if model.raw:
        return model
    whole = config_from_json(config_to_json(config))
    whole.name, whole.backend, whole.max_batch_size = model.name, model.backend, model.max_batch_size
    whole.model_transaction_policy.decoupled = model.decoupled
    for specs, tensors in ((model.inputs, whole.input), (model.outputs, whole.output)):
        del tensors[:]
        for spec in specs:
            tensor = tensors.add(name=spec.name, data_type=_type(spec.datatype), dims=spec.dims)
            if spec.optional:
                tensor.optional = True
    fill_defaults(whole, ())
    return replace(model, raw=config_to_json(whole))


def _spec(tensor: ConfigMessage, optional: bool = False) -> TensorSpec:
    return TensorSpec(tensor.name, v2_datatype(tensor), tuple(tensor.dims), optional)


def _type(datatype: str) -> int:
    from tritonclient.grpc import model_config_pb2

    name = "STRING" if datatype == "BYTES" else datatype
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))
