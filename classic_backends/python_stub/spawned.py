"""Run as the main module of the processes that `multiprocessing` spawns for a model: they can import the model's files,
for `triton_python_backend_utils` is there, and its functions refuse to ask the server."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

API_MODULES = ("triton_python_backend_utils", "c_python_backend_utils")


def _load_api() -> None:
    spec = importlib.util.spec_from_file_location("charonia_stub", str(Path(__file__).parent / "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["charonia_stub"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    for name in API_MODULES:
        sys.modules[name] = importlib.import_module("charonia_stub.backend_utils")


if __name__ == "__mp_main__":
    _load_api()
