"""Loaded ensembles and the models of their steps, which load, change and go without them."""

import logging
from collections.abc import Hashable
from dataclasses import replace

from ..core.errors import CharoniaError, InvalidArgument
from ..core.gateway import ModelLookup
from ..core.model import RawConfig
from .model_registry import ModelEntry, ModelRegistry, ModelVersion
from .model_source import asked_models
from .response_cache import CachedModel

log = logging.getLogger(__name__)


def models_asked_by(entry: ModelEntry) -> frozenset[str]:
    """The models that versions which answer ask: as steps of an ensemble, or as a pipeline declares them."""
    configs = [version.config for version in entry.versions.values()]
    asked = (asked_models(config.backend, config.raw) for config in configs if config is not None)
    return frozenset[str]().union(*asked)


def step_interfaces(config: RawConfig, lookup: ModelLookup) -> Hashable:
    """What the models of an ensemble's steps take and make now, which it is checked against at its load. None while one
    is not there, and for other models."""
    interfaces = []
    for step in _steps(config):
        version = max(step["model_version"], 0)
        try:
            asked = lookup.model_config(step["model_name"], str(version or ""))
        except CharoniaError:
            return None
        interfaces.append((asked.backend, asked.max_batch_size, asked.decoupled, asked.inputs, asked.outputs))
    return tuple(interfaces) or None


def refuse_circle(registry: ModelRegistry, name: str, config: RawConfig) -> None:
    """Raises `InvalidArgument` for an ensemble that an ensemble asks which it would ask itself."""
    seen = set[str]()
    left: list[tuple[str, ...]] = [(name, step["model_name"]) for step in _steps(config)]
    while left:
        path = left.pop()
        if path[-1] == name:
            circle = " -> ".join(path)
            raise InvalidArgument(f"circular dependency between ensembles: {circle}", field="ensemble_scheduling")
        entry = registry.entries.get(path[-1])
        if entry is not None and entry.name not in seen:
            seen.add(entry.name)
            configs = [version.config for version in entry.versions.values() if version.config is not None]
            left += [(*path, step["model_name"]) for config in configs for step in _steps(config.raw)]


async def follow_steps(registry: ModelRegistry, name: str, lookup: ModelLookup) -> None:
    """Check the loaded ensembles that ask a model, directly or not, where it takes or makes something else now, and let
    go of the responses that were cached. One that its steps do not fit any more answers nothing until they do."""
    followed = [name]
    for asked in followed:  # which grows
        asking = [entry.name for entry in registry.entries.values() if asked in models_asked_by(entry)]
        followed += [other for other in asking if other not in followed]
    versions = [version for other in followed for version in registry.entries[other].versions.values()]
    for version in versions:
        loaded = version.loaded
        if loaded is not None and loaded.config.name != name and isinstance(loaded.model, CachedModel):
            loaded.model.forget()
    while any([await _plan_anew(version, lookup) for version in versions]):
        pass  # what became decoupled makes those so that ask it


async def _plan_anew(version: ModelVersion, lookup: ModelLookup) -> bool:
    """Have a loaded ensemble plan its steps if they are others than it was loaded with; whether its config changed."""
    loaded = version.loaded
    interfaces = None if loaded is None else step_interfaces(loaded.config.raw, lookup)
    if loaded is None or interfaces is None or interfaces == loaded.steps:
        return False
    loaded.steps = interfaces
    try:
        await loaded.model.load()
        loaded.unfit = ""
    except CharoniaError as error:
        loaded.unfit = error.message
        log.error("model '%s' does not fit its steps any more: %s", loaded.config.name, error.message)
        return False
    planned = loaded.model.config
    if planned.decoupled == loaded.config.decoupled or version.loaded is not loaded:
        return False
    # Others know a config by its identity, so it is not changed in place; who loads the ensemble meanwhile knows the
    # loaded model by its own.
    loaded.config = replace(planned, aliases=loaded.config.aliases)
    return True


def _steps(config: RawConfig) -> list[RawConfig]:
    return [*config.get("ensemble_scheduling", {}).get("step", ())]
