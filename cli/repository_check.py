"""`charonia check`: what is wrong with a model repository, found without serving it.

Reads configs, versions, labels and warm-up data, completes configs, and builds models without loading them: an error
that only loading finds is not found.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..core.errors import CharoniaError, InvalidArgument
from ..core.gateway import ModelServices
from ..core.model import ModelConfig
from ..engine.build import describe, is_model_file
from ..repository.builder import ModelBuilder, parse_backend_config
from ..repository.catalog import RepositoryCatalog
from ..repository.config_defaults import LANGUAGE_MODEL_BACKEND, detect_checkpoint_backend
from ..repository.config_validation import ignored_field_message, ignored_fields
from ..repository.gateway import InProcessGateway
from ..repository.lifecycle import ignore_progress
from ..repository.memory_budget import DeviceMemory, MemoryBudget
from ..repository.model_source import ModelSource, config_position, is_checkpoint, with_config_position
from ..repository.route_file import ROUTES_FILE
from .options import ConfigOptions


class CheckedModel(NamedTuple):
    """A model that would load. `config`: of its latest version. `findings`: the lines to say about it."""

    config: ModelConfig
    findings: list[str]


@contextmanager
def model_checker(options: ConfigOptions) -> Iterator[Callable[[ModelSource], CheckedModel]]:
    """The check of one model: raises `CharoniaError` for one that would not load. Raises `InvalidArgument` if an option
    is wrong."""
    backends = parse_backend_config(options.backend_config)
    memory = MemoryBudget(DeviceMemory(lambda: sys.maxsize))  # where it will be served there may be more than here
    complete, directory = not options.disable_auto_complete_config, options.backend_directory
    builder = ModelBuilder(backends, complete, memory, backend_directory=directory)
    with closing(asyncio.new_event_loop()) as loop:
        services = ModelServices(InProcessGateway(builder=builder), loop)  # which serve nothing
        yield lambda source: _check_model(source, builder, services)


def print_check_report(repository: Path, options: ConfigOptions) -> int:
    """Print the findings of a repository; returns the exit status, 1 if a model would not load.

    Raises `InvalidArgument` if the directory is missing or empty, or an option is wrong.
    """
    status = 0
    if is_language_model(repository):
        return _print_checkpoint_report(repository)
    with model_checker(options) as check:
        catalog = RepositoryCatalog([repository], config_name=options.model_config_name)
        if not catalog.model_names():
            if is_checkpoint(repository):
                message = f"'{repository}' is an encoder and no model repository: charonia import {repository}"
                raise InvalidArgument(message)
            raise InvalidArgument(f"nothing to check: model repository '{repository}' has no folders")
        for name in catalog.model_names():
            try:
                for finding in check(catalog.read(name)).findings:
                    print(f"{name}: {finding}")
            except CharoniaError as error:
                print(f"{name}: WRONG: {error.message}")
                status = 1
        return max(status, _check_routes(catalog))


def _check_routes(catalog: RepositoryCatalog) -> int:
    """Print what is to be said of `routes.yaml`; the status is 1 if a server would refuse it."""
    try:
        routes = catalog.read_routes()
    except CharoniaError as error:
        print(f"{ROUTES_FILE}: WRONG: {error.message}")
        return 1
    for name, route in routes.items():
        print(f"{ROUTES_FILE}: route '{name}' is good: {route}")
    return 0


def is_language_model(path: Path) -> bool:
    """Whether it is a checkpoint that generates text, or a file in GGUF."""
    if not os.path.isdir(path):  # pathlib's raise errors at names that no file can have
        return os.path.isfile(path) and is_model_file(path)
    return is_checkpoint(path) and detect_checkpoint_backend(path) == LANGUAGE_MODEL_BACKEND


def _print_checkpoint_report(path: Path) -> int:
    try:
        for line in describe(str(path)):
            print(f"{path.name}: {line}")
    except CharoniaError as error:
        print(f"{path.name}: WRONG: {error.message}")
        return 1
    return 0


def _check_model(source: ModelSource, builder: ModelBuilder, services: ModelServices) -> CheckedModel:
    notes, made = [], []
    for version in source.versions:
        try:
            factory = builder.prepare(source, version, services)
            made.append(factory.build(ignore_progress).config)
            notes.append(factory.examine())
            factory.reservation.release()
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None
    findings = [
        f"{config_position(source.config_file, path)}{ignored_field_message(path)}"
        for path in ignored_fields(source.config, made=[config.raw for config in made])
    ]
    numbers = ", ".join(version.number for version in source.versions)
    findings.append("; ".join([f"good: {source.backend}, version {numbers}", *filter(None, notes)]))
    return CheckedModel(made[-1], findings)
