"""The routes that are served: each request for one gets an arm, which answers with the route's name.

Arms of a route take and make the same tensors, and stream alike; it serves nothing while those that are loaded do not.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import msgspec

from ..core.errors import CharoniaError, NotFound, Unavailable
from ..core.extension_contracts import RequestObserver, RouteObserver
from ..core.metrics import Measurement, ModelStatistics
from ..core.model import ModelConfig
from ..core.request import InferRequest
from ..core.request_context import RequestContext
from ..core.tensor import TensorSpec
from ..routing.arm_selector import ArmName, ArmSelector
from ..routing.request_fields import body_fields, infer_fields
from ..routing.route import Route
from ..telemetry.route_metrics import ArmMetrics
from .model_registry import LoadedModel, ModelRegistry, ModelVersion, NotResident

_SEQUENCE_IDLE = 1.0
"""Seconds after which a model forgets a sequence, by default: Triton's `max_sequence_idle_microseconds`."""

_MAX_CONFIGS = 64
_MAX_COUNTED = 64
"""Arms whose counts are kept, those of earlier routes of the name included."""


class ServedRoute:
    """One route, its counts, and the arms of its open sequences. `observers`: follow its requests."""

    def __init__(
        self, name: str, route: Route, registry: ModelRegistry, observers: Iterable[RequestObserver] = ()
    ) -> None:
        self.name, self.route = name, route
        document = msgspec.to_builtins(route)
        observing = (observer.observe_route(name, document) for observer in observers)
        self.observers: tuple[RouteObserver, ...] = tuple(filter(None, observing))
        self._registry = registry
        self._selector = ArmSelector(route)
        # By model and version: the config as it was loaded, and with the route's name.
        self._configs: dict[tuple[str, str], tuple[ModelConfig, ModelConfig]] = {}
        # By model and version.
        self._counted: dict[tuple[str, str], ArmMetrics] = {}
        # By correlation id: model and version where it began, and when it is forgotten. In the order of their last use.
        self._sequences: dict[object, tuple[str, str, float]] = {}

    def follow(self, before: "ServedRoute") -> None:
        """Go on with the open sequences and the counts of the route as it was before."""
        self._sequences, self._counted = before._sequences, before._counted

    def choose(self, context: RequestContext) -> ArmName | None:
        """The arm that serves a request, which `find` finds; None if that depends on what was not read yet, and
        `choose_for` tells."""
        if not self._selector.reads_fields:
            return self._selector.choose(context.headers, context.tenant)
        if context.body is not None:
            return self._selector.choose(context.headers, context.tenant, body_fields(context.body))
        return None

    def choose_for(self, request: InferRequest, context: RequestContext) -> ArmName:
        """As `choose`, once the request was read."""
        return self._selector.choose(context.headers, context.tenant, infer_fields(request))

    def find_any(self, context: RequestContext) -> tuple[LoadedModel, ModelConfig]:
        """An arm for as long as it is not known which one serves: the first in memory that has a weight. Raises as
        `find` if none is, of one that can be loaded, if there is."""
        errors: list[CharoniaError] = []
        for arm in self._selector.weighted:
            try:
                return self.find(*arm, context)
            except CharoniaError as error:
                errors.append(error)
        raise next((error for error in errors if isinstance(error, NotResident)), errors[0])

    def find_for_sequence(
        self, id_: object, end: bool, arm: tuple[str, str], context: RequestContext
    ) -> tuple[LoadedModel, ModelConfig]:
        """The arm where the sequence of a request began: `arm`, if this is its first. Raises as `find`."""
        now = time.monotonic()
        self._forget_idle(now)
        model, version, _ = self._sequences.get(id_, (*arm, 0.0))
        loaded, config = self.find(model, version, context)
        self._sequences.pop(id_, None)
        if not end:
            self._sequences[id_] = model, context.version, now + _idle_seconds(config)
        return loaded, config

    def _forget_idle(self, now: float) -> None:
        while self._sequences:
            oldest = next(iter(self._sequences))
            if self._sequences[oldest][2] > now:
                return
            del self._sequences[oldest]

    def find(self, model: str, version: str, context: RequestContext | None = None) -> tuple[LoadedModel, ModelConfig]:
        """A version of a model, and its config with the route's name.

        Raises:
            CharoniaError: see `ModelRegistry.find_loaded`.
            Unavailable: the arms that are loaded differ in what they take, make, or how they stream.
        """
        loaded = self._registry.find_loaded(model, version, context)
        key = loaded.config.name, loaded.config.version
        known = self._configs.get(key)
        if known is None or known[0] is not loaded.config:
            known = loaded.config, self._own_config(loaded.config)
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            self._configs[key] = known
        return loaded, known[1]

    def _own_config(self, arm: ModelConfig) -> ModelConfig:
        """The config of an arm with the route's name. Raises `Unavailable`: see `find`."""
        difference = self.difference()
        if difference:
            raise Unavailable(f"route '{self.name}' cannot be served: {difference}")
        raw = {**arm.raw, "name": self.name} if "name" in arm.raw else arm.raw
        return replace(arm, name=self.name, aliases=(), raw=raw)

    def difference(self) -> str:
        """What keeps its arms from being those of one route, as far as they are served; empty for nothing."""
        configs = self.configs()
        return next(filter(None, (describe_difference(configs[0], config) for config in configs[1:])), "")

    def count(self, context: RequestContext) -> None:
        if context.end is not None and context.model_found:
            arm = self._counted.get((context.model, context.version))
            if arm is None:
                arm = self._add_counts(context.model, context.version)
            arm.count(context.end, context)

    def _add_counts(self, model: str, version: str) -> ArmMetrics:
        if len(self._counted) >= _MAX_COUNTED:
            arms = {(arm.model, arm.version and str(arm.version)) for arm in self.route.arms}
            gone = (arm for arm in self._counted if arm not in arms and (arm[0], 0) not in arms)
            del self._counted[next(gone, next(iter(self._counted)))]
        return self._counted.setdefault((model, version), ArmMetrics())

    def measurements(self) -> Iterator[Measurement]:
        for (model, version), arm in self._counted.items():
            yield Measurement({"model": model, "version": version}, tuple(arm.readings(self.name)))

    def statistics(self) -> list[ModelStatistics]:
        """The statistics of the requests for the route, by the arms that are served, in their order."""
        arms = dict.fromkeys((config.name, config.version) for config in self.configs())
        counted = {arm: self._counted.get(arm) or ArmMetrics() for arm in arms}
        return [
            ModelStatistics(self.name, version, arm.statistics(), f"{model}:{version}")
            for (model, version), arm in counted.items()
        ]

    def versions(self) -> Iterator[ModelVersion | None]:
        """The versions that the arms stand for now; None for one that is not known."""
        for arm in self.route.arms:
            entry = self._registry.find(arm.model)
            yield None if entry is None else entry.find_version(str(arm.version or ""))

    def open_versions(self, model: str, now: float) -> Iterator[str]:
        began = list(self._sequences.values())
        return (version for name, version, until in began if name == model and until > now)

    def loaded(self) -> list[LoadedModel]:
        """The arms that are served."""
        return [version.loaded for version in self.versions() if version is not None and version.loaded is not None]

    @property
    def ready(self) -> bool:
        """Whether every arm that has a weight is."""
        versions = zip(self.route.arms, self.versions(), strict=True)
        return all(version is not None and version.ready for arm, version in versions if arm.weight)

    def config(self) -> ModelConfig:
        """The config of the first arm that is served; raises the first arm's error if none is."""
        served, first = self.configs(), self.route.arms[0]
        return self._own_config(
            served[0] if served else self._registry.find_config(first.model, str(first.version or ""))
        )

    def configs(self) -> list[ModelConfig]:
        """The configs of the arms that are served, in memory or not."""
        return [version.config for version in self.versions() if version is not None and version.config is not None]


class RouteTable:
    """The routes by name. Observers of their requests are added before there are routes."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.served: dict[str, ServedRoute] = {}
        self.registry = registry
        self.observers: list[RequestObserver] = []
        self.observed_fields: frozenset[str] = frozenset()

    def add_observer(self, observer: RequestObserver, fields: frozenset[str] = frozenset()) -> None:
        """Let an observer follow requests; it serves these of a route's `OBSERVED_FIELDS`."""
        self.observers.append(observer)
        self.observed_fields |= fields

    def replace(self, routes: Mapping[str, Route]) -> list[str]:
        """Serve these routes and no others from now on; one that is as before keeps its counts and sequences. Returns
        the names of those that changed, came or went."""
        before = self.served
        same = {name for name in routes.keys() & before.keys() if before[name].route == routes[name]}
        self.served = {
            name: before[name] if name in same else ServedRoute(name, route, self.registry, self.observers)
            for name, route in routes.items()
        }
        for name in before.keys() & routes.keys() - same:
            self.served[name].follow(before[name])
        self.registry.route_names = frozenset(routes)
        self.registry.routed_models = frozenset(target.model for route in routes.values() for target in route.targets)
        for observer in self.observers:
            observer.forget_others(routes)
        return sorted((routes.keys() | before.keys()) - same)

    def difference(self, name: str, route: Route) -> str:
        """What keeps a route from being served by that name: see `ServedRoute.difference`; or its shadow from being
        asked what arms are."""
        served = ServedRoute(name, route, self.registry)
        configs, shadow = served.configs(), route.shadow
        entry = None if shadow is None else self.registry.find(shadow.model)
        version = None if entry is None or shadow is None else entry.find_version(str(shadow.version or ""))
        if configs and version is not None and version.config is not None:
            return served.difference() or describe_difference(configs[0], version.config)
        return served.difference()

    def open_versions(self, model: str) -> frozenset[str]:
        """The versions of a model where sequences of a route go on. Of any thread."""
        now, served = time.monotonic(), self.served.values()
        return frozenset(number for route in served for number in route.open_versions(model, now))

    def find(self, name: str, version: str) -> ServedRoute | None:
        """The route of that name. Raises `NotFound` if there is one, and a version was asked for."""
        route = self.served.get(name)
        if route is not None and version:
            raise NotFound(f"'{name}' is a route, which has no versions: ask for one of its models", field="model")
        return route


def describe_difference(one: ModelConfig, other: ModelConfig) -> str:
    """What keeps two models from being arms of one route; empty for nothing."""
    first, second = (f"{config.name}:{config.version}" for config in (one, other))
    if one.decoupled != other.decoupled:
        return f"of '{first}' and '{second}' one is decoupled, and one is not"
    for kind, ours, theirs in (("input", one.inputs, other.inputs), ("output", one.outputs, other.outputs)):
        shapes, others = _shapes(one, ours), _shapes(other, theirs)
        for tensor in sorted(shapes.keys() | others.keys()):
            if shapes.get(tensor) != others.get(tensor):
                return (
                    f"{kind} '{tensor}' of '{first}' is {_said(shapes, tensor)}, of '{second}' {_said(others, tensor)}"
                )
    return ""


def _shapes(config: ModelConfig, specs: tuple[TensorSpec, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    batch = (-1,) if config.max_batch_size else ()
    return {spec.name: (spec.datatype, (*batch, *spec.dims)) for spec in specs}


def _said(shapes: Mapping[str, tuple[str, tuple[int, ...]]], tensor: str) -> str:
    return f"{shapes[tensor][0]} {list(shapes[tensor][1])}" if tensor in shapes else "missing"


def _idle_seconds(config: ModelConfig) -> float:
    batching = config.raw.get("sequence_batching") or {}
    return int(batching.get("max_sequence_idle_microseconds") or 0) / 1e6 or _SEQUENCE_IDLE
