"""The models there are: those of the repositories' directories, and a checkpoint that was named on its own."""

import logging
from collections.abc import Hashable, Sequence
from pathlib import Path

from ..core.errors import InvalidArgument, NotFound, Unsupported
from .document import Config
from .source import ModelSource, read_model, stamps_of

log = logging.getLogger(__name__)

_CLOUDS = (("s3:",), ("gs:",), ("as:",))
"""What the paths begin with that tritonserver fetches."""


class Catalog:
    """Looks anew each time it is asked. `config_name`: of other config files, in `configs/`.

    Raises:
        InvalidArgument: a repository is no directory.
        Unsupported: it is somewhere in a cloud.
    """

    def __init__(
        self, repositories: Sequence[Path] = (), single: ModelSource | None = None, config_name: str = ""
    ) -> None:
        for repository in repositories:
            _check_directory(repository)
        self._repositories = tuple(repositories)
        self._single = single
        self._config_name = config_name

    def readable(self) -> bool:
        """Whether every repository can be read at this moment."""
        return None not in [_models(repository) for repository in self._repositories]

    def names(self) -> list[str]:
        """Every model's name once: the single checkpoint's first, the others by name."""
        found = {path.name for repository in self._repositories for path in _models(repository) or ()}
        single = [] if self._single is None else [self._single.name]
        return [*single, *sorted(found - set(single))]

    def repeated(self) -> list[str]:
        """Names that stand for several models; the first of them is served."""
        names = [path.name for repository in self._repositories for path in _models(repository) or ()]
        if self._single is not None:
            names.append(self._single.name)
        return sorted({name for name in names if names.count(name) > 1})

    def directory(self, name: str) -> Path | None:
        """Of that model, if there is one."""
        paths = (repository / name for repository in self._repositories)
        return next((path for path in paths if path.is_dir()), None)

    def stamps(self, name: str) -> Hashable:
        """Of everything in that model's directory: equal as long as nothing of it changes. None: there is nothing."""
        directory = self.directory(name)
        try:
            return None if directory is None else tuple(stamps_of(directory))
        except OSError:  # which reading it says
            return None

    def read(self, name: str, override: Config = None, directory: Path | None = None) -> ModelSource:
        """What that model is made from, with `override` for its config, and in `directory` instead of its own.

        Raises:
            NotFound: there is none.
            InvalidArgument: it cannot be a model; the message names file, line and field.
        """
        if self._single is not None and name == self._single.name and override is None:
            return self._single
        directory = directory or self.directory(name)
        if directory is None:
            raise NotFound(f"no model repository has a folder '{name}'")
        try:
            return read_model(directory, override, self._config_name)
        except (OSError, ValueError, RuntimeError) as error:  # of a loop of links, or a name that no file can have
            raise InvalidArgument(f"cannot read model '{name}': {error}") from None


def _check_directory(repository: Path) -> None:
    if repository.parts[:1] in _CLOUDS:
        message = f"model repository '{repository}': repositories in clouds are not read; copy it, or mount it"
        raise Unsupported(message)
    try:
        there = repository.is_dir()
    except OSError as error:
        raise InvalidArgument(f"cannot read model repository '{repository}': {error.strerror}") from None
    if not there:
        raise InvalidArgument(f"model repository '{repository}' is not a directory")


def _models(repository: Path) -> list[Path] | None:
    try:
        return [path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        log.warning("cannot read the model repository %s: %s", repository, error)
        return None
