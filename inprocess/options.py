"""Keyword arguments become the options of `charonia serve`: the same names, with underscores, and the same checks."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, UnknownOptionError

from ..cli.foreign_flags import TritonFlags, VllmFlags, unknown_flag
from ..cli.options import ServeOptions
from ..cli.other_servers import VLLM_FLAGS
from ..core.errors import CharoniaError, InvalidArgument
from ..engine.vllm.arguments import asks_for_nothing
from ..repository.backend_registry import ENCODER_BACKEND
from ..repository.config_defaults import detect_checkpoint_backend

_TRITON_NAMES = {
    "backend_configuration": "backend_config",
    "cpu_metrics": "allow_cpu_metrics",
    "exit_timeout": "exit_timeout_secs",
    "gpu_metrics": "allow_gpu_metrics",
    "server_id": "id",
    "startup_models": "load_model",
}
"""By the name of an option of Triton's in-process API: the one here."""

_SERVER_OPTIONS = {
    "allow_cpu_metrics",
    "allow_gpu_metrics",
    "exit_on_error",
    "id",
    "machine",
    "metrics_config",
    "metrics_names",
    "strict_readiness",
}
"""The `ServerOptions` that are not about ports, processes and logs."""

_MODEL_GROUPS = ("repository", "engine", "adapters")
_ENDPOINTS_ALONE = {("host",), ("disable_log_requests",), ("enable_log_requests",)}
"""Flags of vLLM's that say where to listen, and what is in the log."""
_POOLING = {
    "runner": {"pooling"},
    "convert": {"embed", "classify", "reward"},
    "task": {"embed", "embedding", "encode", "classify", "score", "reward", "token_embed", "token_classify"},
}
"""vLLM's arguments that ask for what an encoder does anyway."""
_NO_OPTIONS = ServeOptions()

_reader = App(help_flags=(), version_flags=())


@_reader.default
def _read(
    *,
    options: Annotated[ServeOptions, Parameter("*")] = _NO_OPTIONS,
    triton: Annotated[TritonFlags, Parameter("*")] = TritonFlags(),  # noqa: B008
    vllm: Annotated[VllmFlags, Parameter("*")] = VllmFlags(),  # noqa: B008
) -> None: ...


def read_options(arguments: Mapping[str, Any], model: str | None = None) -> ServeOptions:
    """The options that keyword arguments set for a `model`; None sets nothing.

    Raises:
        InvalidArgument: an argument is unknown or wrong, or is about what a program has none of; `field` names it. The
            message has flags.
    """
    given = {name: value for name, value in arguments.items() if not _says_nothing(name, value)}
    pooling = {name for name, values in _POOLING.items() if str(given.get(name, "")) in values}
    if pooling and _is_encoder(model, given.get("backend")):
        given = {name: value for name, value in given.items() if name not in pooling}
    return _read_options(given)


def _is_encoder(model: str | None, backend: str | None) -> bool:
    """Whether a directory's checkpoint is an encoder, or served as one."""
    path = Path(model or "")
    return path.is_dir() and (backend or detect_checkpoint_backend(path)) == ENCODER_BACKEND


_FLAG_IN_TEXT = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


@contextmanager
def in_words_of_programs() -> Iterator[None]:
    """Let errors within the block name arguments where they name flags."""
    try:
        yield
    except CharoniaError as error:
        message = _FLAG_IN_TEXT.sub(lambda flag: flag[1].replace("-", "_"), error.message)
        error.message = message.replace("Unknown option: ", "unknown argument: ")
        error.args = (error.message,)
        raise


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an argument is None, or one of vLLM's for what is not served, at a value that asks for nothing of it."""
    return value is None or (_flag(name) in VLLM_FLAGS and asks_for_nothing(name, value))


def _read_options(arguments: Mapping[str, Any]) -> ServeOptions:
    named = {_TRITON_NAMES.get(name, name): value for name, value in arguments.items()}
    words = [word for name, value in named.items() for word in _words(name, value)]
    try:
        _, bound, _ = _reader.parse_args(words, exit_on_error=False, print_error=False)
    except UnknownOptionError as error:
        known = [name for argument in error.argument_collection for name in argument.names]
        unknown = next(name for name in named if _flag(name) not in known)
        raise InvalidArgument(unknown_flag(_flag(unknown), known), field=unknown) from None
    except CycloptsError as error:
        raise InvalidArgument(str(error)) from None
    triton, vllm = (bound.arguments.get(name, kind()) for name, kind in (("triton", TritonFlags), ("vllm", VllmFlags)))
    triton.check()
    vllm.check()
    options: ServeOptions = vllm.completed(triton.completed(bound.arguments.get("options", _NO_OPTIONS)))
    if stray := next(chain(_stray_names(arguments), _strays(options)), None):
        message = f"'{stray}' is about ports, processes or the log of `charonia serve`, which a program has none of"
        raise InvalidArgument(message, field=stray)
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(name: str, value: Any) -> Iterator[str]:
    """The words of a command line for one argument."""
    if name == "backend_config" and isinstance(value, Mapping):
        value = [f"{backend},{key}={text}" for backend, keys in value.items() for key, text in keys.items()]
    for word in value if isinstance(value, list | tuple | set | frozenset) else (value,):
        yield f"{_flag(name)}={_text(word)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, PathLike):
        value = fspath(value)
    if type(value).__module__ == "torch":  # a dtype
        value = str(value).removeprefix("torch.")
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _stray_names(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The arguments that are given, whatever their values, and mean nothing without endpoints."""
    groups = {field.name for field in fields(ServeOptions)} - {*_MODEL_GROUPS}
    path_of = {name: argument.keys for argument in _reader.assemble_argument_collection() for name in argument.names}
    for name in arguments:
        path = path_of[_flag(_TRITON_NAMES.get(name, name))]
        if path in _ENDPOINTS_ALONE or (path[0] in groups and path[-1] not in _SERVER_OPTIONS):
            yield name


def _strays(options: ServeOptions) -> Iterator[str]:
    """The options that former names of flags have set and mean nothing without endpoints."""
    for group in fields(options):
        ours, plain = getattr(options, group.name), getattr(_NO_OPTIONS, group.name)
        if group.name in _MODEL_GROUPS or ours == plain:
            continue
        for option in fields(ours):
            if option.name not in _SERVER_OPTIONS and getattr(ours, option.name) != getattr(plain, option.name):
                yield option.name
