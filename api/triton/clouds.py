"""The endpoints that Amazon SageMaker and Google Vertex AI ask of a container, on top of v2's.

Their paths and environment variables are tritonserver's, described at
https://docs.aws.amazon.com/sagemaker/latest/dg/deploy-models-frameworks-triton.html and
https://cloud.google.com/vertex-ai/docs/predictions/using-nvidia-triton. Knows of requests nothing but method, path and
headers.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import CharoniaError, InvalidArgument, NotFound, Unsupported
from ..http.error_responses import error_response

ListModels: TypeAlias = Callable[[], list[str]]
"""Names of the models that are served now."""

_KINDS = ("infer", "generate", "generate_stream")
_POSTED = re.compile(r"/(infer|generate|generate_stream|index|load|unload|register|unregister)$")
_LENGTH = b"inference-header-content-length"
_TYPE = b"content-type"
_REDIRECT = b"x-vertex-ai-triton-redirect"


class V2Target(NamedTuple):
    """The method and path of a request to v2."""

    method: str
    path: str


class CloudEndpoint(NamedTuple):
    """A cloud's endpoint on its port, which `flag` sets.

    `binary_media_type`: of a body that is not JSON alone; the length of the JSON in front follows it. `to_v2`: the
    request to v2 that a request stands for; raises `CharoniaError`.
    """

    name: str
    flag: str
    port: int
    binary_media_type: bytes
    to_v2: Callable[[Scope, ListModels], V2Target]


def sagemaker_endpoint(port: int, environment: Mapping[str, str]) -> CloudEndpoint:
    """SageMaker's, of which the environment says which model is asked for what.

    Raises `InvalidArgument` if it does not; the message names the variable.
    """
    model = _variable(environment, "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "--allow-sagemaker")
    ping = _choice(environment, "SAGEMAKER_TRITON_PING_MODE", ("ready", "live"))
    kind = _choice(environment, "SAGEMAKER_TRITON_INFERENCE_TYPE", _KINDS)
    targets = {
        "/ping": V2Target("GET", f"/v2/health/{ping}"),
        "/invocations": V2Target("POST", f"/v2/models/{model}/{kind}"),
    }

    def read(scope: Scope, models: ListModels) -> V2Target:
        if re.match(r"/models(/|$)", scope["path"]):
            raise Unsupported("endpoints of several models are not served on SageMaker")
        return _found(targets, scope)

    media = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
    return CloudEndpoint("SageMaker", "--sagemaker-port", port, media, read)


def vertex_ai_endpoint(port: int | None, model: str, environment: Mapping[str, str]) -> CloudEndpoint:
    """Vertex AI's, of which the environment says the paths, and the port where it is None; `model`: the one asked.

    Raises `InvalidArgument` if it does not; the message names the variable.
    """
    health = _variable(environment, "AIP_HEALTH_ROUTE", "--allow-vertex-ai")
    predict = _variable(environment, "AIP_PREDICT_ROUTE", "--allow-vertex-ai")

    def read(scope: Scope, models: ListModels) -> V2Target:
        if scope["path"] != predict:
            return _found({health: V2Target("GET", "/v2/health/ready")}, scope)
        headers = dict(scope["headers"])
        redirect = headers.get(_REDIRECT, b"").decode("latin-1")
        if redirect:
            path = f"/{redirect.lstrip('/')}"
            # Vertex AI posts everything: a request without a body that is no action of v2 is a GET.
            empty = headers.get(b"content-length", b"0") == b"0"
            return V2Target("GET" if empty and not _POSTED.search(path) else scope["method"], path)
        return _found({predict: V2Target("POST", f"/v2/models/{model or _only(models())}/infer")}, scope)

    if port is None:
        number = environment.get("AIP_HTTP_PORT") or "8080"
        if not number.isdecimal() or int(number) > 65535:
            raise InvalidArgument(f"the environment variable AIP_HTTP_PORT must be a port, got '{number}'")
        port = int(number)
    media = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="
    return CloudEndpoint("Vertex AI", "--vertex-ai-port", port, media, read)


def _found(targets: Mapping[str, V2Target], scope: Scope) -> V2Target:
    target = targets.get(scope["path"])
    if target is None or scope["method"] != target.method:
        raise NotFound("Not Found")
    return target


def _only(models: list[str]) -> str:
    if len(models) != 1:
        raise InvalidArgument(f"there are {len(models)} models: --vertex-ai-default-model does not say which is asked")
    return models[0]


def _variable(environment: Mapping[str, str], name: str, flag: str) -> str:
    if not environment.get(name):
        raise InvalidArgument(f"{flag} needs the environment variable {name}")
    return environment[name]


def _choice(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environment.get(name) or choices[0]
    if value not in choices:
        raise InvalidArgument(f"the environment variable {name} must be one of {', '.join(choices)}, got '{value}'")
    return value


class CloudMiddleware:
    """The HTTP application `app` in the words of a cloud: its requests become v2's, and the responses the cloud's."""

    def __init__(self, app: ASGIApp, cloud: CloudEndpoint, models: ListModels) -> None:
        self._app = app
        self._cloud = cloud
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            target = self._cloud.to_v2(scope, self._models)
        except CharoniaError as error:
            await error_response(error, "/v2")(scope, receive, send)
            return
        # Clouds have the length of the JSON in front of raw tensors in the media type.
        binary, headers = self._cloud.binary_media_type, list(scope["headers"])
        media = dict(headers).get(_TYPE, b"").replace(b" ", b"")
        if media.startswith(binary):
            headers.append((_LENGTH, media.removeprefix(binary)))

        async def send_translated(message: Message) -> None:
            headers = dict(message.get("headers", ()))
            if message["type"] == "http.response.start" and _LENGTH in headers:
                headers[_TYPE] = binary + headers.pop(_LENGTH)
                message = {**message, "headers": list(headers.items())}
            await send(message)

        path = {"method": target.method, "path": target.path, "raw_path": target.path.encode(), "query_string": b""}
        await self._app({**scope, **path, "headers": headers}, receive, send_translated)
