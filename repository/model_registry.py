"""The models that the server knows, and finding one: v2-protocol.md sections 2.5 and 2.6."""

from collections.abc import Iterator

from ..core.errors import InvalidArgument, NotFound, NotReady, Unavailable
from ..core.gateway import RepositoryIndexEntry
from ..core.metrics import Labels, Measurement
from ..core.request_context import current_request
from ..core.statistics import ModelStatistics
from .in_flight import InFlightCounter
from .model_entry import LoadedModel, ModelEntry, ModelVersion


class ModelRegistry:
    """`tally`: of all requests of all models."""

    def __init__(self) -> None:
        self.entries: dict[str, ModelEntry] = {}
        self.in_flight = InFlightCounter()

    def get_or_add(self, name: str) -> ModelEntry:
        """That model; from now on known."""
        return self.entries.setdefault(name, ModelEntry(name))

    def ready(self) -> bool:
        """Every model that is wanted is."""
        return all(entry.ready for entry in self.entries.values() if entry.should_serve)

    def find_version(self, name: str, number: str = "") -> ModelVersion | None:
        """That version, or the latest that is served, if any is; notes in the current request which it is for.

        Raises:
            NotFound: no such model, or version.
        """
        entry, exchange = self.entries.get(name), current_request()
        if exchange is not None:
            exchange.model, exchange.version, exchange.model_found = name, number, entry is not None
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        version = entry.find_version(number)
        if version is None and number:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if exchange is not None and version is not None:
            exchange.version = version.number
        return version

    def find_loaded(self, name: str, number: str = "") -> LoadedModel:
        """What serves that version, or the latest.

        Raises:
            NotFound: no such model or version, or none of its versions is served.
            Unavailable: that version is not served.
            NotReady: the model is being loaded.
        """
        version = self.find_version(name, number)
        if version is not None:
            serving = version.loaded or version.superseded
            if serving is not None:
                return serving
        if number:
            raise Unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        if self.entries[name].change_lock.locked():
            raise NotReady(f"Request for unknown model: '{name}' is not at ready state: it is being loaded")
        raise NotFound(f"Request for unknown model: '{name}' has no available versions")

    def find_counting_model(self, name: str, number: str) -> LoadedModel | None:
        """What counts a request for that version; for one that is not there the latest does."""
        entry = self.entries.get(name)
        version = None if entry is None else entry.versions.get(number) or entry.latest
        return None if version is None else version.loaded

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
