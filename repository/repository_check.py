"""Says what is wrong with a repository, without serving it: configs, versions, completion, labels, warm-up data, and of
language models what their checkpoints' files say of themselves.

Builds models and loads none: what only loading finds, it does not find.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cli.repository_options import CheckOptions
from ..core.errors import CharoniaError, InvalidArgument
from .builder import BackendSettings, Builder
from .catalog import Catalog
from .lifecycle import silent
from .memory_budget import Budget, Memory
from .model_source import ModelSource, is_checkpoint, located
from .unsupported_fields import idle_fields, idleness


@dataclass(frozen=True, slots=True)
class Finding:
    """`error`: the model would not load; else it would, `text` says how or what it would leave out."""

    model: str
    text: str
    error: bool = False


def report(repository: Path, options: CheckOptions) -> int:
    """Print what there is to say; the exit status.

    Raises:
        InvalidArgument: there is no such directory, or nothing in it, or an option is wrong.
    """
    backends = BackendSettings.parse(options.backend_config)
    # Where it will be served there may be more memory than here.
    builder = Builder(backends, not options.disable_auto_complete_config, Budget(Memory(lambda: sys.maxsize)))
    catalog = Catalog([repository], config_name=options.model_config_name)
    if not catalog.names():
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


def check_repository(catalog: Catalog, builder: Builder) -> Iterator[Finding]:
    """Every model in its turn: what is wrong, or what would be served."""
    for name in catalog.names():
        try:
            source = catalog.read(name)
            yield from _check(source, builder)
        except CharoniaError as error:
            yield Finding(name, error.message, error=True)


def _check(source: ModelSource, builder: Builder) -> Iterator[Finding]:
    notes, made = [], []
    for version in source.versions:
        try:
            recipe = builder.recipe(source, version)
            made.append(recipe.make(silent).config.document)
            notes.append(recipe.examine())
            recipe.release()
        except CharoniaError as error:
            raise located(error, source.file) from None
    for path in idle_fields(source.config, made=made):
        yield Finding(source.name, f"{source.where(path)}{idleness(path)}")
    numbers = ", ".join(version.number for version in source.versions)
    yield Finding(source.name, "; ".join([f"good: {source.backend}, version {numbers}", *filter(None, notes)]))
