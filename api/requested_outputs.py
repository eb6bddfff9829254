"""How an output is wanted: as it is, as its greatest classes, or in shared memory. The same over HTTP and gRPC.

v2's sections 6 and 7 where they meet; knows nothing of messages.
"""

from typing import NamedTuple

from ..core.errors import Internal, InvalidArgument
from ..core.tensor import Tensor
from . import raw_tensors


class RequestedOutput(NamedTuple):
    """An output that a request names. `classes`: how many of its greatest, 0 for the output itself; `into`: the shared
    memory to put it in, lent for as long as the request lasts, None for into the response."""

    name: str
    classes: int = 0
    memory: memoryview | None = None

    def validate(self) -> None:
        """Raises `InvalidArgument` if that does not go together."""
        if self.classes and self.memory is not None:
            message = "Output can't set both 'shared_memory_region' and 'classification'"
            raise InvalidArgument(message, field=self.name)


def write_to_shared_memory(output: Tensor, into: memoryview) -> None:
    """Put an output where the client wants it.

    Raises:
        Internal: it is larger.
    """
    needed = raw_tensors.encoded_size(output)
    if needed > len(into):
        raise Internal(
            f"shared memory size specified with the request for output '{output.name}' ({len(into)} bytes) "
            f"should be at least {needed} bytes to hold the results",
            field=output.name,
        )
    raw_tensors.write_into(output, into)
