"""An inference request as an endpoint reads it: what the model gets, and how each output is to be returned.

The same over HTTP and gRPC, but for `binary`, which is HTTP's. Knows nothing of messages. Classification and shared
memory are extensions of v2: https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ..core.errors import Internal, InvalidArgument
from ..core.request import InferRequest
from ..core.tensor import Tensor
from . import raw_tensors
from .deferred_tensors import DeferredInputs


class RequestedOutput(NamedTuple):
    """How an output is to be returned; an empty `name` stands for all that the request does not name.

    `classes`: as so many of its greatest elements, 0 for the output itself; `memory`: in this memory, lent by the
    client while the request lasts, None for in the response; `binary`: as raw bytes behind the JSON.
    """

    name: str
    classes: int = 0
    memory: memoryview | None = None
    binary: bool = False

    def validate(self) -> None:
        """Raises `InvalidArgument` for classes that are to go into memory."""
        if self.classes and self.memory is not None:
            message = "Output can't set both 'shared_memory_region' and 'classification'"
            raise InvalidArgument(message, field=self.name)


class HttpInferRequest(NamedTuple):
    """The request, the outputs that it names, and how all others are returned.

    `deferred`: inputs that are empty in the request until they are decoded (`decode_deferred`).
    """

    request: InferRequest
    outputs: Mapping[str, RequestedOutput]
    default_output: RequestedOutput
    deferred: DeferredInputs = {}


def write_to_shared_memory(output: Tensor, memory: memoryview) -> None:
    """Raises `Internal` for an output that is larger than the memory."""
    needed = raw_tensors.encoded_size(output)
    if needed > len(memory):
        raise Internal(
            f"shared memory size specified with the request for output '{output.name}' ({len(memory)} bytes) "
            f"should be at least {needed} bytes to hold the results",
            field=output.name,
        )
    raw_tensors.write_into(output, memory)
