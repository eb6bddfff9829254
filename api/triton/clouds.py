"""What SageMaker and Vertex AI ask of a container, in v2's words: v2-protocol.md section 15.

Knows their paths and their environment; of requests nothing but method, path and headers.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from starlette.types import Scope

from ...core.errors import InvalidArgument, NotFound, Unsupported

ListModels: TypeAlias = Callable[[], list[str]]
"""Names of those that are served now."""

_KINDS = ("infer", "generate", "generate_stream")
_POSTED = re.compile(r"/(infer|generate|generate_stream|index|load|unload|register|unregister)$")
_REDIRECT = b"x-vertex-ai-triton-redirect"


class V2Target(NamedTuple):
    """A request of v2's."""

    method: str
    path: str


class CloudEndpoint(NamedTuple):
    """A door. `read`: what is asked of v2, or raises `CharoniaError`; `media`: the type of a body that is not JSON
    alone, after which the length of the JSON in front stands."""

    name: str
    flag: str
    port: int
    binary_media_type: bytes
    to_v2: Callable[[Scope, ListModels], V2Target]


def sagemaker_endpoint(port: int, environment: Mapping[str, str]) -> CloudEndpoint:
    """SageMaker's, of which the environment says which model is asked for what.

    Raises:
        InvalidArgument: it does not; the message names the variable.
    """
    model = _said(environment, "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "--allow-sagemaker")
    ping = _one_of(environment, "SAGEMAKER_TRITON_PING_MODE", ("ready", "live"))
    kind = _one_of(environment, "SAGEMAKER_TRITON_INFERENCE_TYPE", _KINDS)
    asked = {
        "/ping": V2Target("GET", f"/v2/health/{ping}"),
        "/invocations": V2Target("POST", f"/v2/models/{model}/{kind}"),
    }

    def read(scope: Scope, models: ListModels) -> V2Target:
        if re.match(r"/models(/|$)", scope["path"]):
            raise Unsupported("endpoints of several models are not served on SageMaker")
        return _found(asked, scope)

    media = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
    return CloudEndpoint("SageMaker", "--sagemaker-port", port, media, read)


def vertex_ai_endpoint(port: int | None, model: str, environment: Mapping[str, str]) -> CloudEndpoint:
    """Vertex AI's, of which the environment says the paths, and the port where it is None; `model`: the one asked.

    Raises:
        InvalidArgument: it does not; the message names the variable.
    """
    health = _said(environment, "AIP_HEALTH_ROUTE", "--allow-vertex-ai")
    predict = _said(environment, "AIP_PREDICT_ROUTE", "--allow-vertex-ai")

    def read(scope: Scope, models: ListModels) -> V2Target:
        if scope["path"] != predict:
            return _found({health: V2Target("GET", "/v2/health/ready")}, scope)
        redirect = dict(scope["headers"]).get(_REDIRECT, b"").decode("latin-1")
        if redirect:
            return _redirected(f"/{redirect.lstrip('/')}", scope)
        return _found({predict: V2Target("POST", f"/v2/models/{model or _only(models())}/infer")}, scope)

    if port is None:
        said = environment.get("AIP_HTTP_PORT") or "8080"
        if not said.isdecimal() or int(said) > 65535:
            raise InvalidArgument(f"the environment variable AIP_HTTP_PORT must be a port, got '{said}'")
        port = int(said)
    media = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="
    return CloudEndpoint("Vertex AI", "--vertex-ai-port", port, media, read)


def _found(asked: Mapping[str, V2Target], scope: Scope) -> V2Target:
    found = asked.get(scope["path"])
    if found is None or scope["method"] != found.method:
        raise NotFound("Not Found")
    return found


def _redirected(path: str, scope: Scope) -> V2Target:
    """Vertex AI posts everything: what has no body, and is no action, is a question."""
    empty = dict(scope["headers"]).get(b"content-length", b"0") == b"0"
    return V2Target("GET" if empty and not _POSTED.search(path) else scope["method"], path)


def _only(models: list[str]) -> str:
    if len(models) != 1:
        raise InvalidArgument(f"there are {len(models)} models: --vertex-ai-default-model does not say which is asked")
    return models[0]


def _said(environment: Mapping[str, str], name: str, flag: str) -> str:
    if not environment.get(name):
        raise InvalidArgument(f"{flag} needs the environment variable {name}")
    return environment[name]


def _one_of(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    said = environment.get(name) or choices[0]
    if said not in choices:
        raise InvalidArgument(f"the environment variable {name} must be one of {', '.join(choices)}, got '{said}'")
    return said
