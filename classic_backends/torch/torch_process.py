"""What torch takes of the process that it computes in: threads, and of GPUs the memory that it keeps."""

from contextlib import suppress

import torch

from ...processes.host import release_free_memory


def set_torch_threads(inside: int, between: int = 0) -> None:
    """Compute an operator with so many, from the thread that calls this. `between`: of operators at once, for the whole
    process and before any is computed; 0 is torch's own number."""
    torch.set_num_threads(inside)
    if between and between != torch.get_num_interop_threads():
        with suppress(RuntimeError):  # they are there already
            torch.set_num_interop_threads(between)


def release_torch_memory() -> None:
    """Return what was freed to the system and to GPUs, for others to have."""
    release_free_memory()
    torch.cuda.empty_cache()
