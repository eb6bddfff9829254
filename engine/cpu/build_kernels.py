"""setuptools' build_ext (pyproject's cmdclass), which compiles the C kernels with a stamp of their sources."""

import runpy
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent


class BuildKernels(build_ext):  # type: ignore[misc]
    """A library that was built from other sources is built again, whatever the times of its files say."""

    def build_extension(self, ext: Extension) -> None:
        stamp: str = runpy.run_path(str(HERE / "source_stamp.py"))["source_stamp"](HERE)
        ext.define_macros.append(("KERNEL_SOURCES", f'"{stamp}"'))
        built = Path(self.get_ext_fullpath(ext.name))
        if built.exists() and stamp.encode() not in built.read_bytes():
            self.force = True
        super().build_extension(ext)
