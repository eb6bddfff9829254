"""The catalog of models that can be loaded: those of the repositories, and a checkpoint of its own."""

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..core.backends import OnProgress
from ..core.errors import AlreadyExists, InvalidArgument, NotFound
from ..core.metrics import Measurement
from ..core.model import RawConfig
from ..routing.route import Route
from .file_marks import files_mark
from .model_source import ModelSource, read_model
from .object_storage.bucket_repository import BucketRepository
from .route_file import ROUTES_FILE, check_route, read_route_file

log = logging.getLogger(__name__)


class FetchedModel(NamedTuple):
    """A model's directory, where it had to be downloaded. Whoever has it calls `release` when nobody needs the
    directory any more."""

    directory: Path | None = None
    release: Callable[[], None] = lambda: None
    place: str = ""


class RepositoryCatalog:
    """Reads the directories anew at each call, and `buckets` as they were last listed. `config_name`: of other config
    files, in `configs/`. `routed_versions`: of a model, those that routes name.

    Raises:
        InvalidArgument: a repository is no directory.
    """

    def __init__(
        self,
        repositories: Sequence[Path] = (),
        single: ModelSource | None = None,
        config_name: str = "",
        buckets: Sequence[BucketRepository] = (),
    ) -> None:
        for repository in repositories:
            try:
                present = repository.is_dir()
            except OSError as error:
                raise InvalidArgument(f"cannot read model repository '{repository}': {error.strerror}") from None
            if not present:
                raise InvalidArgument(f"model repository '{repository}' is not a directory")
        # One directory may be given twice, also by other names.
        places = [(at.st_dev, at.st_ino) for at in map(os.stat, repositories)]
        self._repositories = tuple(path for at, path in enumerate(repositories) if places.index(places[at]) == at)
        self._buckets = tuple({bucket.url: bucket for bucket in buckets}.values())
        self._single = single
        self._config_name = config_name
        self.routed_versions: Callable[[str], frozenset[int]] = lambda model: frozenset()

    def refresh(self, since: float | None = None) -> bool:
        """Whether every repository can be read at this moment; lists the buckets, unless they were `since`."""
        readable = [_model_folders(repository) is not None for repository in self._repositories]
        return all(readable + [bucket.refresh(since) for bucket in self._buckets])

    @property
    def has_buckets(self) -> bool:
        return bool(self._buckets)

    @property
    def unknown(self) -> list[str]:
        """The buckets that could never be listed."""
        return [bucket.url for bucket in self._buckets if not bucket.is_known]

    def model_names(self) -> list[str]:
        """Every model's name once: the single checkpoint's first, the others by name."""
        names = {path.name for repository in self._repositories for path in _model_folders(repository) or ()}
        names |= {name for bucket in self._buckets for name in bucket.model_names()}
        single = [] if self._single is None else [self._single.name]
        return [*single, *sorted(names - set(single))]

    def empty_repositories(self) -> list[str]:
        """The repositories that can be read, and hold no model."""
        local = [str(path) for path in self._repositories if _model_folders(path) == []]
        return local + [bucket.url for bucket in self._buckets if bucket.is_known and not bucket.model_names()]

    def dangling_links(self) -> dict[str, str]:
        """What is to be said of links among the models' folders that lead nowhere, by the names of the models that they
        would be."""
        entries = sorted(path for repository in self._repositories for path in repository.glob("[!.]*"))
        links = [path for path in entries if path.is_symlink() and not path.exists()]
        return {path.name: f"{path} is a link to '{os.path.realpath(path)}', which is not there" for path in links}

    def _directories(self, name: str) -> list[Path]:
        """The directories of models of that name; none for a name that no directory can have."""
        return [path for repository in self._repositories if os.path.isdir(path := repository / name)]

    def _holders(self, name: str) -> list[BucketRepository]:
        return [bucket for bucket in self._buckets if name in bucket.model_names()]

    def steps_there(self, source: ModelSource) -> frozenset[str]:
        """The models that a source asks, without those that may be missing and are."""
        return frozenset(
            step for step in source.steps if step not in source.optional_steps or step in self.model_names()
        )

    def read_routes(self) -> dict[str, Route]:
        """The routes of the repositories' `routes.yaml`, but for buckets that are `unknown`. May take long.

        Raises:
            InvalidArgument: a file is wrong; the message names it.
            CharoniaError: see `BucketRepository.read_file`.
        """
        routes: dict[str, Route] = {}
        files = [(repository / ROUTES_FILE, str(repository / ROUTES_FILE)) for repository in self._repositories]
        fetched = [(bucket.read_file(ROUTES_FILE), bucket.place(ROUTES_FILE)) for bucket in self._buckets]
        files += [(file, place) for file, place in fetched if file is not None]
        for file, place in files:
            read = read_route_file(file, place)
            twice = sorted(routes.keys() & read.keys())
            if twice:
                message = f"route '{twice[0]}' is in the {ROUTES_FILE} of another repository, too"
                raise InvalidArgument(f"{place}: {message}")
            routes |= read
        names = self.servable_names(*routes.values())
        for name, route in routes.items():
            check_route(name, route, routes, names)
        return routes

    def servable_names(self, *routes: Route) -> frozenset[str]:
        """The names of models that arms of `routes` may have: of a bucket that is away any, for it may have them."""
        away = {target.model for route in routes for target in route.targets} if self.unknown else ()
        return frozenset({*self.model_names(), *(self._single.aliases if self._single else ()), *away})

    def stamps(self, name: str) -> Hashable:
        """The marks of all files in a model's directories: equal as long as nothing changes. None if there are none."""
        try:
            stamps = [files_mark(path) for path in self._directories(name)]
            return (*stamps, *(stamp for bucket in self._holders(name) for stamp in bucket.stamps(name))) or None
        except OSError:  # reading the model reports it
            return None

    def fetch(self, name: str, on_progress: OnProgress, override: RawConfig | None = None) -> FetchedModel:
        """Download a model that is in a bucket, and there alone, as far as its config, or `override`, asks for;
        nothing for others. May take long.

        Raises:
            CharoniaError: see `BucketRepository.fetch`.
        """
        holders = self._holders(name)
        if len(holders) != 1 or self._directories(name) or (self._single and name == self._single.name):
            return FetchedModel()
        [bucket] = holders
        fetched = bucket.fetch(name, override, self._config_name, on_progress, self.routed_versions(name))
        return FetchedModel(fetched.path, fetched.drop, bucket.place(name))

    def measure(self) -> Iterator[Measurement]:
        """The buckets and their cache, at a scrape."""
        for bucket in self._buckets:
            yield bucket.measure()
        yield from (kept.measure() for kept in {bucket.cache for bucket in self._buckets})

    def close(self) -> None:
        """Stop downloads, and give up what they left."""
        for kept in {bucket.cache for bucket in self._buckets}:
            kept.close()
        for bucket in self._buckets:
            bucket.close()

    def read(
        self, name: str, override: RawConfig | None = None, directory: Path | None = None, place: str = ""
    ) -> ModelSource:
        """The source of a model, with `override` for its config, and from `directory` instead of its own; `place`: see
        `FetchedModel`.

        Raises:
            NotFound: there is none.
            AlreadyExists: there are several; the message names them.
            InvalidArgument: it cannot be a model; the message names file, line and field.
        """
        single = self._single if self._single is not None and name == self._single.name else None
        directories = [directory] if directory is not None else self._directories(name)
        places = [*map(str, directories), *(() if single is None or directory else [single.versions[0].path])]
        places += [] if directory is not None else [bucket.place(name) for bucket in self._holders(name)]
        if len(places) > 1:
            message = f"model '{name}' is not unique across all model repositories: {' and '.join(places)}"
            raise AlreadyExists(f"{message}; none of them is served until one is left")
        if self._single is not None and name in self._single.aliases and directories:
            checkpoint = self._single.versions[0].path
            message = f"model '{name}' in {directories[0]}: the checkpoint {checkpoint} is called so, too"
            raise AlreadyExists(f"{message}, by --served-model-name, and answers to that name")
        if single is not None and override is None:
            return single
        if not directories:
            raise NotFound(f"no model repository has a folder '{name}'")
        try:
            return read_model(directories[0], override, self._config_name, place, self.routed_versions(name))
        except (OSError, ValueError, RuntimeError) as error:  # of a loop of links, or a name that no file can have
            raise InvalidArgument(f"cannot read model '{name}': {error}") from None


def _model_folders(repository: Path) -> list[Path] | None:
    try:
        folders = [path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        log.warning("cannot read the model repository %s: %s", repository, error)
        return None
    return [path for path in folders if _is_utf8_name(path.name)]


@cache
def _is_utf8_name(name: str) -> bool:
    """Whether responses and metrics can have this name; warns once if not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        log.warning("folder %r is no model: its name is not UTF-8", os.fsencode(name))
        return False
    return True
