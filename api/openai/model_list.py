"""/v1/models of OpenAI's API, /tokenizer_info of vLLM's, /server_info and /model_info of SGLang's: which models there
are, and what they are like."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import NotReady
from ...core.gateway import Administration, ModelLookup, ServedAdapter
from ...core.model import ModelConfig
from ..http.error_responses import json_response
from .json_body import field_error, model_field


class ModelListRoutes:
    """The endpoints that tell of the models, and their handlers."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/model_info", self.model_info, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        configs = self._administration.model_configs()
        data = [model_card(config, name) for config in configs for name in (config.name, *config.aliases)]
        return json_response({"object": "list", "data": [*data, *map(adapter_card, self._administration.adapters())]})

    async def model(self, request: Request) -> Response:
        with model_field():
            name = request.path_params["model"]
            config = self._administration.model_config(name)
        named = (adapter_card(adapter) for adapter in self._administration.adapters() if adapter.is_called(name))
        return json_response(next(named, None) or model_card(config, name))

    async def tokenizer_info(self, request: Request) -> Response:
        with model_field():
            name = request.query_params.get("model") or only_model(self._administration)
            return json_response(await self._administration.tokenizer_info(name))

    async def server_info(self, request: Request) -> Response:
        """By it SGLang's router learns which model's requests are for this server."""
        return json_response({"served_model_name": self._only_config().name})

    async def model_info(self, request: Request) -> Response:
        config = self._only_config()
        generates = any(output.name == "text_output" for output in config.outputs)
        paths = {"model_path": config.name, "tokenizer_path": config.name}
        return json_response(paths | {"is_generation": generates, "weight_version": config.version})

    def _only_config(self) -> ModelConfig:
        with model_field():
            return self._administration.model_config(only_model(self._administration))


def only_model(lookup: ModelLookup) -> str:
    """The name of the only model that there is. Raises `InvalidArgument`, and `NotReady` while there may come one."""
    models = lookup.model_configs()
    if not models and not lookup.ready():
        raise NotReady("the server is not ready")
    if len(models) != 1:
        raise field_error("model", "must be given: this server has several, or none")
    return models[0].name


def max_model_len(config: ModelConfig) -> int | None:
    """The tokens that prompt and answer of a language model may have together; None for other models."""
    length = config.parameters.get("max_model_len")
    return None if length is None else int(length)


def model_card(config: ModelConfig, name: str) -> dict[str, Any]:
    """A model as /v1/models lists it, by one of its names; `root` is its own."""
    card = {"id": name, "object": "model", "created": config.created, "owned_by": "charonia"}
    taken = [*(() if config.transcribes else ("text",)), *sorted(config.media)]
    own = {"root": config.name, "parent": None, "max_model_len": max_model_len(config)}
    return card | own | ({"input_modalities": taken} if config.media else {})


def adapter_card(served: ServedAdapter) -> dict[str, Any]:
    card = model_card(served.config, served.name)
    return card | {"root": served.adapter.path, "parent": served.config.name}
