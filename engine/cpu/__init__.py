"""The C extension: kernels for the CPU, and their typed Python faces. Knows nothing of models or requests.

How it is put together, for whoever adds a kernel:

- Plain C with a C ABI, no Python and no torch headers. One file per subject, listed in pyproject's ext-modules with
  all that it includes. `level.h` names the levels of instruction sets (portable < avx2 < avx512 < avx512bf16); a kernel
  asks `charonia_level()` at each call, and marks what needs more than the compiler's default with TARGET_AVX2 and its
  kin.
  Kernels written once for all levels go through `each_level.h`: a `.inc` over the vectors of `simd.h`.
- Flags: never -ffast-math (it deletes NaN checks and flushes denormals in the whole process). `fma()` of `simd.h`, not
  luck, where bits matter. **A row's result must not depend on which rows share the call, nor on the threads.**
- A kernel is a function of a `Team` (`team.h`): threads that each do their part, and meet before one reads what another
  wrote. For few elements the first does all. In a function called by itself the team is an OpenMP region, whose pool is
  torch's: `library.py` imports torch first. In a program (`tape.c`) it is those of a crew that have come (`crew.h`);
  who comes later joins between two operations.
- Each exported function is called `charonia_...`, has a line in `library.SIGNATURES`, a typed face in a module beside
  it that checks nothing at run time (its callers own shapes and dtypes), a reference in torch and a test against
  float64 at every level the machine has (`library.at(level)`, fixture `level` of tests/engine/kernels).
- Without a compiler, or with CHARONIA_KERNELS=none, `library.level()` is None: callers ask `library.serves(dtype,
  device)` once, while they are built, and take the torch path. CHARONIA_KERNELS=avx2 (or another level) caps the level.
- `make install` builds after a change; so does `pip install --no-build-isolation --editable .`.
"""
