"""The classification extension: instead of an output's values, the largest of them with their indices and labels.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md. Knows no
protocol: the number of classes is an argument.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import CharoniaError, InvalidArgument
from ..core.model import ModelConfig
from ..core.tensor import Tensor

_MOST_ELEMENTS = 1_000_000
_KINDS = "iuf"
_NARROW = ("FP16", "BF16")


def classify(config: ModelConfig, output: Tensor, classes: int) -> Tensor:
    """The `classes` largest values of an output as BYTES `value:index` or `value:index:label`, the largest first.

    Its shape is [batch, classes], or [classes] for a model that does not batch, with fewer classes where the output has
    fewer values.

    Raises:
        InvalidArgument: the output's datatype has no order, or it is too large.
    """
    if output.data.dtype.kind not in _KINDS or output.datatype in _NARROW:
        raise _refuse(output, f"class result not available for output due to unsupported type '{output.datatype}'")
    if math.prod(output.shape) > _MOST_ELEMENTS:
        raise _refuse(output, "classification output tensor too large")
    batched = config.max_batch_size > 0 and len(output.shape) > 0
    one = output.shape[1:] if batched else output.shape
    rows = output.data.reshape(output.shape[0] if batched else 1, math.prod(one))
    count, labels = min(classes, rows.shape[1]), config.labels.get(output.name, ())
    data = np.empty((len(rows), count), np.object_)
    for place, row in enumerate(rows):
        data[place, :] = [_class(row[index].item(), index, labels) for index in _greatest(row)[:count].tolist()]
    shape = (len(rows), count) if batched else (count,)
    return Tensor(output.name, "BYTES", shape, data.reshape(shape))


def _greatest(row: NDArray[Any]) -> NDArray[np.intp]:
    # Indices by falling value, equal values in their order, NaN last.
    values = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    return len(row) - 1 - np.argsort(values[::-1], kind="stable")[::-1]


def _class(value: int | float, index: int, labels: tuple[str, ...]) -> bytes:
    said = f"{value:f}" if isinstance(value, float) else str(value)
    label = labels[index] if index < len(labels) else ""
    return f"{said}:{index}:{label}".encode() if label else f"{said}:{index}".encode()


def _refuse(output: Tensor, text: str) -> CharoniaError:
    return InvalidArgument(text, field=output.name)
