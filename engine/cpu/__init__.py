"""The C extension: kernels for the CPU, and their typed Python faces. Knows nothing of models or requests.

How it is put together, and how to add a kernel:

- Plain C with a C ABI, no Python and no torch headers. One file per subject, listed in pyproject's ext-modules with
  everything that it includes. `level.h` names the levels of instruction sets (portable < avx2 < avx512core < avx512 <
  avx512bf16 < amx, or on Arm portable < dotprod < i8mm < bfmmla); a kernel asks `charonia_level()` at each call, and
  marks code that needs more than the compiler's default with TARGET_AVX2 and its like. Those for all levels go through
  `each_level.h`: a `.inc` over the vectors of `simd.h`. `tile_registers.h` has the instructions of AMX, which tests
  replace by a model in plain C, as they do those of AVX-512; those of Arm they run under an emulator.
- Flags: never -ffast-math (it deletes NaN checks and flushes denormals in the whole process). `fma()` of `simd.h`, not
  luck, where bits matter. **A row's result must not depend on which rows share the call, nor on the threads.**
- A kernel is a function of a `Team` (`parallel_region.h`): threads that each do their share, with barriers before one
  reads what another wrote. With few elements the first thread does all. In an exported function the team is an OpenMP
  region, whose pool is torch's: `library.py` imports torch first. In a program (`program.c`) it is the members of a
  `ThreadPool` (`thread_pool.h`) that have come to the job; a thread that comes later is admitted between two
  operations. If there is a processor for each of them, and no other, each has its own.
- Each exported function is called `charonia_...`, has a line in `library.SIGNATURES`, a typed face in a module beside
  it that checks nothing at run time (its callers own shapes and dtypes), a reference in torch, and a test against
  float64 at every level the machine has (fixture `level` of tests/engine/cpu).
- A kernel that is part of a decoder's program has a kind in `op_trace.py` and `program.h`, a case in `program.c`, and a
  face that records itself when it is called with a `SymbolicTensor`.
- Without a compiler, or with CHARONIA_KERNELS=none, `library.level()` is None: callers ask `library.supports(dtype,
  device)` once, while they are built, and take the torch path. CHARONIA_KERNELS=avx2 (or another level) caps the level.
- `make install` builds after a change; wherever the package is installed, so does `compile_kernels.py`. The library
  has a stamp of its sources (`source_stamp.py`), and is refused beside others.
"""
