"""The registry of the models that the server knows, loaded or not, and the lookup in it."""

from collections.abc import Iterator

from ..core.errors import InvalidArgument, NotFound, NotReady, Unavailable
from ..core.gateway import RepositoryIndexEntry
from ..core.metrics import Labels, Measurement
from ..core.request_context import RequestContext
from ..core.statistics import ModelStatistics
from .model_entry import LoadedModel, ModelEntry


class ModelRegistry:
    """Every known model by its name."""

    def __init__(self) -> None:
        self.entries: dict[str, ModelEntry] = {}

    def get_or_add(self, name: str) -> ModelEntry:
        """The entry of a model, which is known from then on."""
        return self.entries.setdefault(name, ModelEntry(name))

    def ready(self) -> bool:
        """Whether every model that is to be served is ready."""
        return all(entry.ready for entry in self.entries.values() if entry.should_serve)

    def find_loaded(self, name: str, number: str = "", context: RequestContext | None = None) -> LoadedModel:
        """The loaded model of that version, or of the latest. `context` is told the model and its version.

        Raises:
            NotFound: no such model or version, or none of its versions is served.
            Unavailable: that version is not served.
            NotReady: the model is being loaded.
        """
        entry = self.entries.get(name)
        if context is not None:
            context.model, context.version, context.model_found = name, number, entry is not None
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        version = entry.find_version(number)
        if version is None and number:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if context is not None and version is not None:
            context.version = version.number
        if version is not None and version.loaded is not None:
            return version.loaded
        if number:
            raise Unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        if entry.change_lock.locked():
            raise NotReady(f"Request for unknown model: '{name}' is not at ready state: it is being loaded")
        raise NotFound(f"Request for unknown model: '{name}' has no available versions")

    def index(self) -> list[RepositoryIndexEntry]:
        return [shown for entry in self.entries.values() for shown in entry.index()]

    def statistics(self, name: str, number: str) -> list[ModelStatistics]:
        """Raises `InvalidArgument` for what was asked for and is not served."""
        if not name:
            return [each for entry in self.entries.values() for each in entry.statistics()]
        entry = self.entries.get(name)
        if entry is None or not entry.loaded_versions:
            raise InvalidArgument(f"requested model '{name}' is not available")
        found = entry.statistics(number)
        if not found:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return found

    def labels(self, name: str, number: str) -> Labels:
        """Of everything that is measured of a version."""
        return self.get_or_add(name).labels(number)

    def measurements(self) -> Iterator[Measurement]:
        for entry in self.entries.values():
            yield from entry.measurements()
