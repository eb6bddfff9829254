"""What transformers imports and a tower never uses: torch's compiler, its parts for many processes, scipy for losses.
They take longer than all else of a tower's start."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_TRACING = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""The module of the compiler that transformers' masks name."""
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators that tell the compiler how to take a function, and change nothing else."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Meanwhile transformers is imported, and makes a module, without them. What needs the compiler afterwards imports
    it then. Only the main thread of a process has a say in it, and only the first time; else all is as ever."""
    if {"transformers", _COMPILER} & sys.modules.keys() or threading.current_thread() is not threading.main_thread():
        yield
        return
    spared: dict[str, Any] = {_COMPILER: _LateModule(_COMPILER), _TRACING: _LateModule(_TRACING)}
    if "scipy" not in sys.modules:
        spared["scipy"] = None
    marks = {name: getattr(torch.compiler, name) for name in _MARKS}
    sys.modules.update(spared)
    vars(torch)["_dynamo"] = spared[_COMPILER]
    vars(torch.compiler).update(dict.fromkeys(_MARKS, _mark))
    available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = available
        vars(torch.compiler).update(marks)
        if vars(torch)["_dynamo"] is spared[_COMPILER]:
            del vars(torch)["_dynamo"]
        for name, module in spared.items():
            if sys.modules.get(name, spared) is module:
                del sys.modules[name]


class _LateModule(ModuleType):
    """Stands for the module of that name, which is imported for all but the decorators and the one class that are asked
    for by the way."""

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _mark
        if name == "TransformGetItemToIndex":
            return lambda: getattr(self._imported(), name)()
        if name.startswith("__") and (name, self.__name__) != ("__path__", _COMPILER):
            raise AttributeError(name)
        return getattr(self._imported(), name)

    def _imported(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)


def _mark(function: Any = None, *_: Any, **__: Any) -> Any:
    return function or _mark
