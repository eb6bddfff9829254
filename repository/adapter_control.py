"""The adapters of the models that are served: their names beside the models', and how they come and go."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.adapter import Adapter
from ..core.errors import InvalidArgument, NotFound
from ..core.gateway import ServedAdapter
from ..core.model import AdaptableModel
from .model_registry import LoadedModel, ModelEntry, ModelRegistry

_MAX_NAME_LENGTH = 256
"""Characters of an adapter's name, which stands in metrics and logs."""


class AdapterControl:
    """Loads and unloads adapters, each of the latest version of a model."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def served(self) -> list[ServedAdapter]:
        """The adapters of all models."""
        return [adapter for entry in self._registry.entries.values() for adapter in self._served_of(entry)]

    def _served_of(self, entry: ModelEntry) -> Iterator[ServedAdapter]:
        for name, adapter in entry.adapters.items():
            assert entry.latest is not None
            assert entry.latest.loaded is not None
            plain = self._registry.resolve(name) == (entry, name)
            yield ServedAdapter(name if plain else f"{entry.name}:{name}", entry.latest.loaded.config, adapter)

    async def load(self, name: str, path: str, model: str = "", replace: bool = False) -> Adapter:
        _check_name(name)
        loaded = self._find_model(model)
        entry, adapter = self._registry.resolve(name)
        if entry is not None and not adapter:
            raise InvalidArgument(f"the name '{name}' is a model's: an adapter needs another", field="lora_name")
        if entry is not None and entry.name != loaded.config.name:
            message = f"the name '{name}' is that of an adapter of model '{entry.name}'"
            raise InvalidArgument(message, field="lora_name")
        with _held(loaded) as adaptable:
            return await adaptable.load_adapter(name, path, replace)

    async def unload(self, name: str) -> ServedAdapter:
        entry, adapter = self._registry.resolve(name)
        if entry is None or not adapter:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", field="lora_name")
        loaded = self._registry.find_loaded(entry.name)
        with _held(loaded) as adaptable:
            gone = ServedAdapter(name, loaded.config, entry.adapters[adapter])
            await adaptable.unload_adapter(adapter)
        return gone

    def _find_model(self, name: str) -> LoadedModel:
        """The model that an adapter is loaded for: the one of that `name`, or the only one that takes adapters."""
        if name:
            return self._registry.find_loaded(name)
        names = [entry.name for entry in self._registry.entries.values() if entry.takes_adapters]
        if not names:
            raise NotFound("no model takes adapters: they need --enable-lora")
        if len(names) > 1:
            message = f"several models take adapters: base_model_name must be one of {', '.join(names)}"
            raise InvalidArgument(message, field="base_model_name")
        return self._registry.find_loaded(names[0])


def _check_name(name: str) -> None:
    if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        message = f"an adapter's name must be 1 to {_MAX_NAME_LENGTH} printable characters, got {name[:64]!r}"
        raise InvalidArgument(message, field="lora_name")


@contextmanager
def _held(loaded: LoadedModel) -> Iterator[AdaptableModel]:
    """The model, which is not unloaded before the block ends."""
    if loaded.capabilities.adapters is None:
        raise InvalidArgument(f"model '{loaded.config.name}' takes no adapters")
    loaded.in_flight.increment()
    try:
        yield loaded.capabilities.adapters
    finally:
        loaded.in_flight.decrement()
