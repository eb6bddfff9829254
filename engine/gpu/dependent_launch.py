"""Programmatic dependent launch (CUDA C Programming Guide, "Programmatic Dependent Launch and Synchronization"): the
programs of a kernel are launched while those of the kernel before it end, and wait on the device for what it writes.

A kernel that takes part waits before anything else, also where its program has nothing to do: else it might be over
before the kernel before it, and the next one, which waits for it alone, would read too early. Other kernels begin when
all before them are over, as ever. `runtime.dependent_launch` is what launches ask.
"""

import triton
import triton.language as tl


@triton.jit
def begin_dependent(DEPENDENT: tl.constexpr):
    """Waits for the kernel before this one to be over, and lets the next one launch its programs, which wait."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
