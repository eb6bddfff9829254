"""What the published clients send and lend."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tritonclient.utils.shared_memory as shared_memory
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype


def given(client: Any, name: str, array: NDArray[Any], **manner: Any) -> Any:
    """An input of `client`, the module tritonclient.http or tritonclient.grpc."""
    tensor = client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array, **manner)
    return tensor


@contextmanager
def lent(client: Any, name: str, size: int) -> Iterator[Any]:
    """Shared memory that the server knows by `name`."""
    key = f"/charonia_e2e_{name}_{os.getpid()}"
    region = shared_memory.create_shared_memory_region(name, key, size, create_only=True)
    client.register_system_shared_memory(name, key, size)
    try:
        yield region
    finally:
        client.unregister_system_shared_memory(name)
        shared_memory.destroy_shared_memory_region(region)
