"""Python models for tests, from the text of their `model.py`."""

import asyncio
import textwrap
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from charonia.classic_backends.model import ClassicModel
from charonia.classic_backends.python.python_backend import PythonBackend
from charonia.core.model import ModelConfig, ModelSamples
from charonia.core.request import InferRequest, InferResponse
from charonia.core.tensor import Tensor, TensorSpec
from charonia.repository.gateway import InProcessGateway
from charonia.telemetry.shared_state import ModelServices, ServerAdministration

from ..asking import serving

HEADER = """
import asyncio, json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def x(request):
    return pb_utils.get_input_tensor_by_name(request, "X").as_numpy()

def y(value, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.asarray(value, np.int32).reshape(-1))], **more)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
"""


def write_model(directory: Path, body: str) -> Path:
    """The version directory of a model whose class `TritonPythonModel` has this body."""
    version = directory / "model" / "1"
    version.mkdir(parents=True, exist_ok=True)
    source = HEADER + "\nclass TritonPythonModel:\n" + textwrap.indent(textwrap.dedent(body), "    ")
    (version / "model.py").write_text(source)
    return version


def config(decoupled: bool = False, instances: int = 1, **raw: Any) -> ModelConfig:
    whole = {"name": "model", "instance_group": [{"kind": "KIND_CPU", "count": instances}], **raw}
    return ModelConfig(
        "model",
        "1",
        "python",
        max_batch_size=raw.get("max_batch_size", 0),
        decoupled=decoupled,
        inputs=(TensorSpec("X", "INT32", (-1,)),),
        outputs=(TensorSpec("Y", "INT32", (-1,)), TensorSpec("T", "BYTES", (-1,))),
        parameters=raw.get("parameters", {}),
        raw=whole,
    )


@asynccontextmanager
async def python_model(
    directory: Path,
    body: str,
    gateway: ServerAdministration | None = None,
    samples: ModelSamples | None = None,
    **settings: Any,
) -> AsyncIterator[ClassicModel]:
    """A served model with this body."""
    backend = PythonBackend(ModelServices(gateway or InProcessGateway(), asyncio.get_running_loop()))
    more = {} if samples is None else {"samples": samples}
    async with serving(backend, config(**settings), write_model(directory, body), **more) as model:
        yield model


def request(*numbers: int, outputs: tuple[str, ...] | None = None, **parameters: Any) -> InferRequest:
    array = np.array(numbers, np.int32)
    return InferRequest("id", {"X": Tensor("X", "INT32", array.shape, array)}, outputs, parameters)


def values(response: InferResponse) -> Mapping[str, Any]:
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}
