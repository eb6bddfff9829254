"""The models of the hub as its workers know them: what is served, and how a language model is put together again."""

import pickle
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..core.errors import CharoniaError
from ..core.model import ModelConfig
from ..engine.client.llm import LlmModel, TextModelSpec
from ..repository.gateway import InProcessGateway
from ..repository.model_registry import LoadedModel, ModelEntry


class ServedModel(NamedTuple):
    """A loaded version. `number`: its own, which no other load gets. `names`: that requests may call it by. `parts`: of
    a language model. `inline`: the hub answers in its event loop."""

    number: int
    config: ModelConfig
    latest: bool
    names: tuple[str, ...]
    parts: TextModelSpec | None
    inline: bool


class ServedModels(NamedTuple):
    """The loaded models; `listed`: the configs of `ModelLookup.model_configs`."""

    models: tuple[ServedModel, ...] = ()
    listed: tuple[ModelConfig, ...] = ()

    def pickled(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def of_pickle(cls, data: bytes) -> "ServedModels":
        """The models that `pickled` wrote; to be read only from this server's own hub."""
        served = pickle.loads(data)
        assert isinstance(served, cls)
        return served


class ModelCensus:
    """Numbers the loaded models of a gateway, and tells which are served. `on_numbered`: called with each, once."""

    def __init__(self, gateway: InProcessGateway, on_numbered: Callable[[int, LoadedModel], None]) -> None:
        self._gateway = gateway
        self._on_numbered = on_numbered
        self._last = 0
        self._numbered: dict[int, tuple[LoadedModel, int]] = {}
        self._parts: dict[int, TextModelSpec] = {}

    def number_of(self, loaded: LoadedModel) -> int:
        known = self._numbered.get(id(loaded))
        if known is not None and known[0] is loaded:
            return known[1]
        self._last += 1
        self._numbered[id(loaded)] = loaded, self._last
        self._on_numbered(self._last, loaded)
        return self._last

    def model(self, number: int) -> LoadedModel | None:
        return next((loaded for loaded, own in self._numbered.values() if own == number), None)

    def take(self) -> ServedModels:
        """Take stock of what is served now, and forget the rest."""
        registry, routes = self._gateway.registry, self._gateway.routes.served
        aliases: dict[str, list[str]] = {}
        for alias, name in registry.aliases.items():
            aliases.setdefault(name, []).append(alias)
        models: list[ServedModel] = []
        for entry in registry.entries.values():
            own = [] if entry.name in registry.aliases else [entry.name]
            names = tuple(name for name in (*own, *aliases.get(entry.name, ())) if name not in routes)
            models += self._versions(entry, names)
        served = {model.number for model in models}
        self._numbered = {key: pair for key, pair in self._numbered.items() if pair[1] in served}
        self._parts = {number: parts for number, parts in self._parts.items() if number in served}
        try:
            listed = tuple(self._gateway.model_configs())
        except CharoniaError:  # of a route whose arms do not fit together: whoever asks for the list is told
            listed = ()
        return ServedModels(tuple(models), listed)

    def _versions(self, entry: ModelEntry, names: tuple[str, ...]) -> Iterator[ServedModel]:
        for version in entry.versions.values():
            loaded = version.loaded
            if loaded is None or loaded.unfit:  # the hub says why
                continue
            number = self.number_of(loaded)
            if isinstance(loaded.model, LlmModel) and number not in self._parts:
                self._parts[number] = loaded.model.export_spec()
            parts, inline = self._parts.get(number), loaded.capabilities.inline is not None
            yield ServedModel(number, loaded.config, version is entry.latest, names, parts, inline)
