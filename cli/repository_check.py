"""`charonia check`: what is wrong with a model repository, found without serving it.

Reads configs, versions, labels and warm-up data, completes configs, and builds models without loading them: an error
that only loading finds is not found.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from ..repository.builder import BackendSettings, ModelBuilder
from ..repository.catalog import RepositoryCatalog
from ..repository.lifecycle import ignore_progress
from ..repository.memory_budget import DeviceMemory, MemoryBudget
from ..repository.model_source import ModelSource, is_checkpoint, with_config_position
from ..repository.unsupported_fields import ignored_field_message, ignored_fields
from .repository_options import CheckOptions


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A line of the report. `error`: the model would not load; otherwise `text` says how it would be served."""

    model: str
    text: str
    error: bool = False


def print_check_report(repository: Path, options: CheckOptions) -> int:
    """Print the findings of a repository; returns the exit status, 1 if a model would not load.

    Raises:
        InvalidArgument: the directory is missing or empty, or an option is wrong.
    """
    backends = BackendSettings.parse(options.backend_config)
    # Where it will be served there may be more memory than here.
    builder = ModelBuilder(
        backends, not options.disable_auto_complete_config, MemoryBudget(DeviceMemory(lambda: sys.maxsize))
    )
    catalog = RepositoryCatalog([repository], config_name=options.model_config_name)
    if not catalog.model_names():
        raise InvalidArgument(_nothing(repository))
    status = 0
    for finding in check_repository(catalog, builder):
        print(f"{finding.model}: {'WRONG: ' if finding.error else ''}{finding.text}")
        status |= finding.error
    return int(status)


def _nothing(repository: Path) -> str:
    if is_checkpoint(repository):
        return f"'{repository}' is a checkpoint and no model repository: charonia serve {repository}"
    return f"nothing to check: model repository '{repository}' has no folders"


def check_repository(catalog: RepositoryCatalog, builder: ModelBuilder) -> Iterator[CheckFinding]:
    """The findings of every model of a repository."""
    for name in catalog.model_names():
        try:
            source = catalog.read(name)
            yield from _check(source, builder)
        except CharoniaError as error:
            yield CheckFinding(name, error.message, error=True)


def _check(source: ModelSource, builder: ModelBuilder) -> Iterator[CheckFinding]:
    notes, made = [], []
    for version in source.versions:
        try:
            recipe = builder.prepare(source, version)
            made.append(recipe.make(ignore_progress).config.raw)
            notes.append(recipe.examine())
            recipe.release()
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None
    for path in ignored_fields(source.config, made=made):
        yield CheckFinding(source.name, f"{source.config_position(path)}{ignored_field_message(path)}")
    numbers = ", ".join(version.number for version in source.versions)
    yield CheckFinding(source.name, "; ".join([f"good: {source.backend}, version {numbers}", *filter(None, notes)]))
