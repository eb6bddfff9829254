"""How a request wants its outputs returned: as they are, as classes, or in the client's shared memory.

Knows no messages. Classification and shared memory are extensions of v2:
https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

import math
from typing import NamedTuple

import numpy as np

from ..core.errors import Internal, InvalidArgument
from ..core.model import ModelConfig
from ..core.tensor import Tensor
from . import raw_tensors

_MOST_ELEMENTS = 1_000_000


class RequestedOutput(NamedTuple):
    """How an output is to be returned.

    `classes`: as so many of its greatest elements, 0 for the output itself; `memory`: in this memory, lent by the
    client while the request lasts, None for in the response; `binary`: as raw bytes behind the JSON (HTTP only).
    """

    classes: int = 0
    memory: memoryview | None = None
    binary: bool = False

    def apply(self, config: ModelConfig, output: Tensor) -> Tensor:
        """The tensor that the response tells of; its data are written to `memory` if there is one. Raises
        `InvalidArgument` for an output that cannot be classified, `Internal` for one larger than the memory."""
        tensor = classify(config, output, self.classes) if self.classes else output
        if self.memory is None:
            return tensor
        raw = raw_tensors.encode_view(tensor)
        if len(raw) > len(self.memory):
            raise Internal(
                f"shared memory size specified with the request for output '{tensor.name}' ({len(self.memory)} bytes) "
                f"should be at least {len(raw)} bytes to hold the results",
                field=tensor.name,
            )
        # numpy copies without the interpreter's lock.
        np.frombuffer(self.memory, np.uint8, len(raw))[:] = np.frombuffer(raw, np.uint8)
        return tensor


def classify(config: ModelConfig, output: Tensor, classes: int) -> Tensor:
    """The `classes` largest values of an output as BYTES `value:index` or `value:index:label`, the largest first.

    Its shape is [batch, classes], or [classes] for a model that does not batch, with fewer classes where the output has
    fewer values. Raises `InvalidArgument` if the output's datatype has no order, or it is too large.
    """
    if output.data.dtype.kind not in "iuf" or output.datatype in ("FP16", "BF16"):
        text = f"class result not available for output due to unsupported type '{output.datatype}'"
        raise InvalidArgument(text, field=output.name)
    if math.prod(output.shape) > _MOST_ELEMENTS:
        raise InvalidArgument("classification output tensor too large", field=output.name)
    batched = config.max_batch_size > 0 and len(output.shape) > 0
    one = output.shape[1:] if batched else output.shape
    rows = output.data.reshape(output.shape[0] if batched else 1, math.prod(one))
    count, labels = min(classes, rows.shape[1]), config.labels.get(output.name, ())
    data = np.empty((len(rows), count), np.object_)
    for place, row in enumerate(rows):
        # Indices by falling value, equal values in their order, NaN last.
        values = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
        greatest = len(row) - 1 - np.argsort(values[::-1], kind="stable")[::-1]
        data[place, :] = [_class(row[index].item(), index, labels) for index in greatest[:count].tolist()]
    shape = (len(rows), count) if batched else (count,)
    return Tensor(output.name, "BYTES", shape, data.reshape(shape))


def _class(value: int | float, index: int, labels: tuple[str, ...]) -> bytes:
    number = f"{value:f}" if isinstance(value, float) else str(value)
    label = labels[index] if index < len(labels) else ""
    return f"{number}:{index}:{label}".encode() if label else f"{number}:{index}".encode()
