"""/tokenize and /detokenize of vLLM's API.

Translates between the protocol and the gateway; decides nothing.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument, NotReady
from ...core.gateway import Gateway, ModelHandle
from ...core.request import TokenizeRequest
from ..http.connection import CancelOnDisconnect
from ..http.error_responses import json_response
from ..http.request_context import context_of
from .chat_messages import parse_messages
from .json_body import NoOpValues, decode_body, read_members

_NO_OP_VALUES: NoOpValues = {
    "return_token_strs": (False,),
    "tools": ([],),
    "mm_processor_kwargs": ({},),
}


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TokenizeRoutes:
    """The endpoints and their handlers."""

    def __init__(self, gateway: Gateway, max_input_size: int) -> None:
        self._gateway = gateway
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        body = decode_body(await read_members(request, self._max_input_size), TokenizeBody, _NO_OP_VALUES)
        model = self._acquire(request, body.model)
        async with CancelOnDisconnect(request.receive):
            tokens = await model.tokenize(_tokenize_request(body))
        length = model.config.parameters.get("max_model_len")
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": None if length is None else int(length),
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = decode_body(await read_members(request, self._max_input_size), DetokenizeBody, {})
        model = self._acquire(request, body.model)
        async with CancelOnDisconnect(request.receive):
            prompt = await model.detokenize(body.tokens)
        return json_response({"prompt": prompt})

    def _acquire(self, request: Request, name: str | None) -> ModelHandle:
        """The model of a request, which need not name the only one that there is."""
        if name is None:
            models = self._gateway.model_configs()
            if not models and not self._gateway.ready():
                raise NotReady("the server is not ready")
            if len(models) != 1:
                raise InvalidArgument("model must be given: this server has several, or none", field="model")
            name = models[0].name
        return self._gateway.acquire(context_of(request.scope), name)


def _tokenize_request(body: TokenizeBody) -> TokenizeRequest:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("give either prompt or messages", field="prompt")
    if body.messages is None:
        for name in ("chat_template", "chat_template_kwargs", "continue_final_message"):
            if getattr(body, name):
                raise InvalidArgument(f"{name} needs messages", field=name)
        special = body.add_special_tokens is not False
        return TokenizeRequest(prompt=body.prompt or "", add_special_tokens=special)
    if body.add_special_tokens:
        message = "add_special_tokens is not supported with messages: their template writes its own"
        raise InvalidArgument(message, field="add_special_tokens")
    return TokenizeRequest(prompt=parse_messages(body.messages, body))
