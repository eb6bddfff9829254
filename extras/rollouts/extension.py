"""Rollouts as an extension of the server's routes, and shadows as observers of its requests."""

from ...core.extension_contracts import (
    ExtensionHost,
    NoOptions,
    ObserverExtension,
    RequestObserver,
    ResidentModels,
    RoutesExtension,
    RoutesPlan,
    ServedRoutes,
    ServerFacts,
)
from ...core.metrics import MetricFamily

ROLLOUT_FAMILIES = (
    MetricFamily("charonia_rollout_share_ratio", "gauge", "Share of a route's requests that its rollout's version has"),
    MetricFamily("charonia_rollout_decisions_total", "counter", "Steps of rollouts that ended, by what was decided"),
)
SHADOW_FAMILIES = (
    MetricFamily("charonia_shadow_requests_total", "counter", "Copies for a route's shadow, by what became of them"),
    MetricFamily("charonia_shadow_seconds", "histogram", "Requests that arm and shadow answered, by whose time it is"),
    MetricFamily("charonia_shadow_running", "gauge", "Copies that wait for their request's end, or are being answered"),
)


def plan_rollouts(options: NoOptions, server: ServerFacts) -> RoutesPlan:
    return RoutesPlan(serve=_serve_rollouts, metrics=ROLLOUT_FAMILIES)


def _serve_rollouts(host: ExtensionHost) -> ServedRoutes:
    from .endpoints import RolloutRoutes
    from .rollout_control import RolloutControl

    control = RolloutControl(host.administration, host.state)
    return ServedRoutes(
        routes=RolloutRoutes(control).routes(),
        running=control.running,
        measure=control.measure,
        request_ended=control.request_ended,
        of_routes=True,
    )


def _observe_routes(models: ResidentModels) -> RequestObserver:
    from .shadow import ShadowTraffic

    return ShadowTraffic(models)


ROLLOUTS = RoutesExtension(NoOptions, "", plan_rollouts)
SHADOWS = ObserverExtension(_observe_routes, SHADOW_FAMILIES, frozenset({"shadow"}))
