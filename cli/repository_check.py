"""`charonia check`: what is wrong with a model repository, found without serving it.

Reads configs, versions, labels and warm-up data, completes configs, and builds models without loading them: an error
that only loading finds is not found.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from ..core.gateway import ModelServices
from ..repository.builder import ModelBuilder, parse_backend_config
from ..repository.catalog import RepositoryCatalog
from ..repository.config_validation import ignored_field_message, ignored_fields
from ..repository.gateway import InProcessGateway
from ..repository.lifecycle import ignore_progress
from ..repository.memory_budget import DeviceMemory, MemoryBudget
from ..repository.model_source import ModelSource, config_position, is_checkpoint, with_config_position
from .options import ConfigOptions


def print_check_report(repository: Path, options: ConfigOptions) -> int:
    """Print the findings of a repository; returns the exit status, 1 if a model would not load.

    Raises `InvalidArgument` if the directory is missing or empty, or an option is wrong.
    """
    backends = parse_backend_config(options.backend_config)
    memory = MemoryBudget(DeviceMemory(lambda: sys.maxsize))  # where it will be served there may be more than here
    complete, directory = not options.disable_auto_complete_config, options.backend_directory
    builder = ModelBuilder(backends, complete, memory, backend_directory=directory)
    catalog = RepositoryCatalog([repository], config_name=options.model_config_name)
    if not catalog.model_names():
        if is_checkpoint(repository):
            message = f"'{repository}' is a checkpoint and no model repository: charonia serve {repository}"
            raise InvalidArgument(message)
        raise InvalidArgument(f"nothing to check: model repository '{repository}' has no folders")
    status = 0
    with closing(asyncio.new_event_loop()) as loop:
        services = ModelServices(InProcessGateway(builder=builder), loop)  # which serve nothing
        for name in catalog.model_names():
            try:
                for finding in _check_model(catalog.read(name), builder, services):
                    print(f"{name}: {finding}")
            except CharoniaError as error:
                print(f"{name}: WRONG: {error.message}")
                status = 1
    return status


def _check_model(source: ModelSource, builder: ModelBuilder, services: ModelServices) -> Iterator[str]:
    """The lines about a model that would load; raises `CharoniaError` for another."""
    notes, made = [], []
    for version in source.versions:
        try:
            factory = builder.prepare(source, version, services)
            made.append(factory.build(ignore_progress).config.raw)
            notes.append(factory.examine())
            factory.reservation.release()
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None
    for path in ignored_fields(source.config, made=made):
        yield f"{config_position(source.config_file, path)}{ignored_field_message(path)}"
    numbers = ", ".join(version.number for version in source.versions)
    yield "; ".join([f"good: {source.backend}, version {numbers}", *filter(None, notes)])
