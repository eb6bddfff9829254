"""Compiles the C kernels into the folder of an installed package: `python -m charonia.engine.cpu.compile_kernels`.

For a package that was installed without a compiler. Needs one, and neither setuptools nor the tree that the package
came from: the C sources are in the package.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from .source_stamp import source_stamp

COMMAND = "python -m charonia.engine.cpu.compile_kernels"

COMPILE_ARGUMENTS = (
    "-std=gnu11",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
)
"""As pyproject.toml has them, which is not in a package."""

_ERROR_LINES = 10


def compile_kernels(folder: Path) -> Path:
    """Compile the C sources in `folder` to the library beside them, with the compiler that CC names, or the one that
    Python was built with.

    Raises:
        OSError: there is no such compiler, or nothing may be written there.
        RuntimeError: the compiler failed; the message has the end of what it says.
    """
    library = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    unfinished = library.with_suffix(f".{os.getpid()}")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    stamp = f'-DKERNEL_SOURCES="{source_stamp(folder)}"'
    sources = [str(path) for path in sorted(folder.glob("*.c"))]
    command = [*compiler, *COMPILE_ARGUMENTS, "-shared", "-fPIC", stamp, "-o", str(unfinished), *sources]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError("\n".join(done.stderr.splitlines()[-_ERROR_LINES:]) or f"{compiler[0]} failed")
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)
    return library


def main() -> int:
    """Print where the library is; the status is 1 if it could not be made."""
    try:
        print(f"compiled {compile_kernels(Path(__file__).parent)}")
    except (OSError, RuntimeError) as error:
        print(f"no kernels: {error}", file=sys.stderr)
        print("a C compiler with OpenMP is needed: apt-get install gcc, or dnf install gcc", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
