"""torch's process-wide resources: its threads, and the GPU memory that it caches."""

from contextlib import suppress

import torch

from ...processes.host import release_free_memory


def set_torch_threads(intra_op: int, inter_op: int = 0) -> None:
    """Set the threads of one operator, for the calling thread, and of operators that run at once, for the whole process
    and only before the first runs; 0 keeps torch's own number."""
    torch.set_num_threads(intra_op)
    if inter_op and inter_op != torch.get_num_interop_threads():
        with suppress(RuntimeError):  # the threads are running already
            torch.set_num_interop_threads(inter_op)


def release_torch_memory() -> None:
    """Return freed memory to the system and to GPUs."""
    release_free_memory()
    torch.cuda.empty_cache()
