"""The installed TensorRT-LLM: imported, its version checked, and compared with the stubs in `typings`.

The stubs are what the adapter relies on: mypy checks our calls against them, `differences` checks the package. The
import takes seconds and brings torch and MPI into the process, so it waits until a model needs it.
"""

import ast
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import Unsupported

SUPPORTED = "1.1 to before 1.3"
_SUPPORTED = re.compile(r"1\.(1(?!\.0rc)|2)(\D|$)")

_NO_TELEMETRY = "TRTLLM_NO_USAGE_STATS"
"""TensorRT-LLM reports its use to NVIDIA unless this is 1, which it is by default here."""

_STUBS = Path(__file__).with_name("typings") / "tensorrt_llm"

_KEYWORDS = {
    "tensorrt_llm.LLM": "TorchLlmArgs",
    "tensorrt_llm._tensorrt_engine.LLM": "TrtLlmArgs",
}
"""Classes that take further keywords -> the pydantic model in `tensorrt_llm.llmapi` whose fields these are."""


def import_tensorrt_llm() -> str:
    """Import the package and return its version; takes a while.

    Raises:
        Unsupported: it is not there, cannot be imported, or is of a version that the stubs do not describe.
    """
    if find_spec("tensorrt_llm") is None:
        raise Unsupported("this model needs TensorRT-LLM: pip install '.[tensorrt-llm]'", field="backend")
    os.environ.setdefault(_NO_TELEMETRY, "1")
    try:
        version = str(import_module("tensorrt_llm").__version__)
    except Exception as error:  # a missing driver or library raises many things
        raise Unsupported(f"tensorrt_llm is installed and cannot be imported: {error}", field="backend") from error
    if not _SUPPORTED.match(version):
        known = f"which this adapter does not know; it knows {SUPPORTED}"
        raise Unsupported(f"tensorrt_llm {version} is installed, {known}")
    return version


class Stub(NamedTuple):
    """One class of the stubs: its `module` and name, the attributes it declares, and the signatures of its methods by
    name, `self` left out. A default of `...` stands for one that is not relied on."""

    module: str
    name: str
    attributes: frozenset[str]
    methods: Mapping[str, inspect.Signature]


@cache
def read_stubs() -> Mapping[str, Stub]:
    """Every class of the stubs, by its dotted path."""
    stubs = {}
    for file in sorted(_STUBS.rglob("*.pyi")):
        parts = file.relative_to(_STUBS.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields = [statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)]
                attributes = frozenset(field.id for field in fields if isinstance(field, ast.Name))
                methods = {
                    method.name: _signature(method) for method in node.body if isinstance(method, ast.FunctionDef)
                }
                stubs[f"{module}.{node.name}"] = Stub(module, node.name, attributes, methods)
    return stubs


def _signature(function: ast.FunctionDef) -> inspect.Signature:
    arguments = function.args
    positional = arguments.args[1:]
    keyword = arguments.kwonlyargs
    required = len(positional) - len(arguments.defaults)
    defaults = [*[None] * required, *arguments.defaults, *arguments.kw_defaults]
    parameters = []
    for argument, default in zip((*positional, *keyword), defaults, strict=True):
        kind = inspect.Parameter.KEYWORD_ONLY if argument in keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        parameters.append(inspect.Parameter(argument.arg, kind, default=value))
    return inspect.Signature(parameters)


_NOT_RELIED_ON = (..., inspect.Parameter.empty)


def differences() -> Iterator[str]:
    """One line for each thing that the imported package lacks of the stubs, or has otherwise."""
    for path, stub in read_stubs().items():
        if stub.name.startswith("_"):  # the shape of something that we never name
            continue
        try:
            real = getattr(import_module(stub.module), stub.name)
            for name, expected in stub.methods.items():
                if name == "__init__":
                    yield from (f"{path}: {line}" for line in _compare(expected, _constructor_defaults(path, real)))
                elif not name.startswith("__"):
                    defaults = _defaults(getattr(real, name))
                    yield from (f"{path}.{name}: {line}" for line in _compare(expected, defaults))
        except (ImportError, AttributeError) as error:
            yield f"{path} is not there ({error})"


def _compare(expected: inspect.Signature, real: Mapping[str, Any] | None) -> Iterator[str]:
    """`real`: see `_defaults`."""
    if real is None:
        return
    for name, parameter in expected.parameters.items():
        if name not in real:
            yield f"has no argument {name}"
            continue
        relied_on = parameter.default not in _NOT_RELIED_ON and real[name] not in _NOT_RELIED_ON
        if relied_on and real[name] != parameter.default:
            yield f"{name} is {real[name]!r} by default, expected {parameter.default!r}"
    for name, default in real.items():
        if default is inspect.Parameter.empty and name not in expected.parameters:
            yield f"needs {name}, which the adapter does not know"


def _constructor_defaults(path: str, real: Any) -> dict[str, Any] | None:
    if hasattr(real, "model_fields"):
        return _field_defaults(real)
    if path not in _KEYWORDS:
        return _defaults(real)
    keywords = getattr(import_module("tensorrt_llm.llmapi"), _KEYWORDS[path])
    return (_defaults(real, open_ended=True) or {}) | _field_defaults(keywords)


def _defaults(function: Any, open_ended: bool = False) -> dict[str, Any] | None:
    """The defaults of a function's arguments by name, `Parameter.empty` for a required one. None where it takes any
    keyword without saying which, unless it may be `open_ended`."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not open_ended and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.name != "self" and parameter.kind not in variadic
    }


def _field_defaults(model: Any) -> dict[str, Any]:
    """`_defaults` of a pydantic model; `...` where a default is made anew for each call."""
    return {
        name: inspect.Parameter.empty if field.is_required() else ... if field.default_factory else field.default
        for name, field in model.model_fields.items()
    }
