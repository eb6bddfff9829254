"""The one door to the installed TensorRT-LLM: finds it, and calls what its contract has.

Importing it takes seconds and brings torch and MPI into the process, so that waits until a model needs it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ...core.errors import Unsupported
from .api_versions import ApiVersion, api_version_of

NAME = "tensorrt_llm"

_NO_TELEMETRY = "TRTLLM_NO_USAGE_STATS"
"""Newer versions report their use to NVIDIA unless this is 1; a server of ours does so only if its operator says."""


@dataclass(frozen=True, slots=True)
class TrtllmPackage:
    """An installed version, and what we know of it."""

    version: str
    world: ApiVersion

    @classmethod
    def find(cls) -> "TrtllmPackage":
        """Import it; takes a while.

        Raises:
            Unsupported: it is not there, cannot be imported, or is of a version that we do not know.
        """
        if find_spec(NAME) is None:
            raise Unsupported("this model needs TensorRT-LLM: pip install 'charonia[tensorrt-llm]'", field="backend")
        os.environ.setdefault(_NO_TELEMETRY, "1")
        try:
            version = str(import_module(NAME).__version__)
        except Exception as error:  # a missing driver or library says so in many ways
            raise Unsupported(f"tensorrt_llm is installed and cannot be imported: {error}", field="backend") from error
        return cls(version, api_version_of(version))

    def make(self, call: str, /, **arguments: Any) -> Any:
        """Call one of the contract's classes.

        Raises:
            Internal: the contract has no such call.
        """
        known: Callable[..., Any] = resolve(self.world.check(call, arguments).path)
        return known(**arguments)

    def tell(self, owner: Any, call: str, /, **arguments: Any) -> Any:
        """Call a method of `owner`, by its name in the contract: class, dot, method.

        Raises:
            Internal: the contract has no such call.
        """
        self.world.check(call, arguments)
        method: Callable[..., Any] = getattr(owner, call.rpartition(".")[2])
        return method(**arguments)


def resolve(path: str) -> Any:
    """What a dotted path names: modules as far as there are any, attributes from there.

    Raises:
        AttributeError: nothing.
    """
    module, rest = path, list[str]()
    while True:
        try:
            found = import_module(module)
            break
        except ModuleNotFoundError as error:
            if not (error.name and module.startswith(error.name)) or "." not in module:
                raise
            module, _, attribute = module.rpartition(".")
            rest.insert(0, attribute)
    for attribute in rest:
        found = getattr(found, attribute)
    return found
