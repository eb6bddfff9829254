"""`charonia check`: what is wrong with a model repository, found without serving it.

Reads configs, versions, labels and warm-up data, completes configs, and builds models without loading them: an error
that only loading finds is not found.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..core.backends import ignore_progress
from ..core.errors import CharoniaError, InvalidArgument
from ..core.model import ModelConfig
from ..engine.build import describe, is_model_file
from ..repository.backend_registry import LANGUAGE_MODEL_BACKEND
from ..repository.builder import ModelBuilder, parse_backend_config
from ..repository.catalog import RepositoryCatalog
from ..repository.config_defaults import detect_checkpoint_backend
from ..repository.config_options import ConfigOptions
from ..repository.config_validation import ignored_field_message, ignored_fields
from ..repository.gateway import InProcessGateway
from ..repository.memory_budget import DeviceMemory, MemoryBudget
from ..repository.model_source import ModelSource, config_position, is_checkpoint, with_config_position
from ..repository.object_storage.bucket_repository import open_buckets
from ..repository.object_storage.locations import is_bucket_url
from ..repository.route_file import ROUTES_FILE, check_observed
from ..telemetry.shared_state import ModelServices
from .extensions import observed_fields


class CheckedModel(NamedTuple):
    """A model that would load. `config`: of its latest version. `findings`: the lines to say about it."""

    config: ModelConfig
    findings: list[str]


@contextmanager
def model_checker(options: ConfigOptions) -> Iterator[Callable[[ModelSource], CheckedModel]]:
    """The check of one model: raises `CharoniaError` for one that would not load. Raises `InvalidArgument` if an option
    is wrong."""
    backends = parse_backend_config(options.backend_config, options.backend_directory)
    memory = MemoryBudget(DeviceMemory(lambda: sys.maxsize))  # where it will be served there may be more than here
    complete, directory = not options.disable_auto_complete_config, options.backend_directory
    builder = ModelBuilder(backends, complete, memory, backend_directory=directory)
    with closing(asyncio.new_event_loop()) as loop:
        services = ModelServices(InProcessGateway(builder=builder), loop)  # which serve nothing
        yield lambda source: _check_model(source, builder, services)


def print_check_report(places: Sequence[str], options: ConfigOptions, cache: Path | None = None) -> int:
    """Print the findings of repositories, or of one checkpoint; returns the exit status, 1 if a model would not load.
    `cache`: where models of buckets are kept, which are downloaded as a server downloads them.

    Raises:
        InvalidArgument: a directory is missing, there are no models, or an option is wrong.
        CharoniaError: a bucket cannot be read.
    """
    if not places:
        raise InvalidArgument("nothing to check: name a model repository")
    if len(places) == 1 and is_language_model(Path(places[0])):
        return _print_checkpoint_report(Path(places[0]))
    local = [Path(place) for place in places if not is_bucket_url(place)]
    buckets = open_buckets([place for place in places if is_bucket_url(place)], cache, None)
    with (
        model_checker(options) as check,
        closing(RepositoryCatalog(local, config_name=options.model_config_name, buckets=buckets)) as catalog,
    ):
        _refuse_nothing_to_check(catalog, places)
        failed = [not _print_findings(name, catalog, check) for name in catalog.model_names()]
        links = catalog.dangling_links()
        for name, reason in links.items():
            print(f"{name}: WRONG: {reason}")
        return max(any(failed), bool(links), _check_routes(catalog))


def _refuse_nothing_to_check(catalog: RepositoryCatalog, places: Sequence[str]) -> None:
    """Raises `InvalidArgument` where there is no model, or a bucket that could not be listed."""
    if catalog.unknown:
        raise InvalidArgument(f"model repository {catalog.unknown[0]} is away, and was never read from here")
    if catalog.model_names() or catalog.dangling_links():
        return
    for place in places:
        if not is_bucket_url(place) and is_checkpoint(Path(place)):
            raise InvalidArgument(f"'{place}' is an encoder and no model repository: charonia import {place}")
    names = " and ".join(f"'{place}'" for place in places)
    raise InvalidArgument(f"nothing to check: model repository {names} has no folders")


def _print_findings(name: str, catalog: RepositoryCatalog, check: Callable[[ModelSource], CheckedModel]) -> bool:
    """Whether the model would load."""
    try:
        fetched = catalog.fetch(name, ignore_progress)
        try:
            for finding in check(catalog.read(name, None, fetched.directory, fetched.place)).findings:
                print(f"{name}: {finding}")
        finally:
            fetched.release()
    except CharoniaError as error:
        print(f"{name}: WRONG: {error.message}")
        return False
    return True


def _check_routes(catalog: RepositoryCatalog) -> int:
    """Print what is to be said of `routes.yaml`; the status is 1 if a server would refuse it."""
    try:
        routes = catalog.read_routes()
        for name, route in routes.items():
            check_observed(name, route, observed_fields())
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
    notes, configs = [], []
    for version in source.versions:
        try:
            factory = builder.prepare(source, version, services)
            configs.append(factory.build(ignore_progress).config)
            notes.append(factory.examine())
            factory.reservation.release()
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None
    findings = [
        f"{config_position(source.config_file, path)}{ignored_field_message(path)}"
        for path in ignored_fields(source.config, made=[config.raw for config in configs])
    ]
    numbers = ", ".join(version.number for version in source.versions)
    findings.append("; ".join([f"good: {source.backend}, version {numbers}", *filter(None, notes)]))
    return CheckedModel(configs[-1], findings)
