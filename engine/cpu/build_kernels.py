"""setuptools' build_ext (pyproject's cmdclass), which compiles the C kernels with a stamp of their sources."""

import runpy
import sys
from contextlib import suppress
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent

WITHOUT_KERNELS = """
*** charonia is built WITHOUT its C kernels: {reason}
*** On a CPU torch computes then, several times more slowly. Install a C compiler (apt-get install gcc libc6-dev), and
*** install charonia again; or compile them where it is installed: python -m charonia.engine.cpu.compile_kernels
"""


class BuildKernels(build_ext):  # type: ignore[misc]
    """A library that was built from other sources is built again, whatever the times of its files say. Without a
    compiler there is a package all the same, and loud words."""

    def build_extension(self, ext: Extension) -> None:
        stamp: str = runpy.run_path(str(HERE / "source_stamp.py"))["source_stamp"](HERE)
        ext.define_macros.append(("KERNEL_SOURCES", f'"{stamp}"'))
        built = Path(self.get_ext_fullpath(ext.name))
        if built.exists() and stamp.encode() not in built.read_bytes():
            self.force = True
        try:
            super().build_extension(ext)
        except Exception as error:  # the extension is optional: setuptools goes on without it
            _say_loudly(WITHOUT_KERNELS.format(reason=error))
            raise


def _say_loudly(text: str) -> None:
    """pip keeps what a build that succeeds says to itself, but not from the terminal."""
    print(text, file=sys.stderr)
    if not sys.stderr.isatty():
        with suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(text)
