"""/v1/audio/transcriptions and /v1/audio/translations of OpenAI's API: a form with a sound becomes a request to a model
that writes sounds down."""

from contextlib import aclosing

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.gateway import ModelLookup
from ..http.connection import CancelOnDisconnect, EventStreamResponse
from ..http.forms import FormRoute, read_form
from ..http.request_context import context_of, record_body, request_id_of
from ..metadata import ServerInfo
from .json_body import field_error, model_field
from .model_list import only_model
from .transcript_writer import TranscriptEvents, transcript_response
from .transcription_request import parse_transcription

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


class AudioRoutes:
    def __init__(self, lookup: ModelLookup, info: ServerInfo) -> None:
        self._lookup = lookup
        self._max_input_size = info.max_input_size

    def routes(self) -> list[Route]:
        return [
            FormRoute(TRANSCRIPTIONS, self.transcribe, methods=["POST"]),
            FormRoute(TRANSLATIONS, self.translate, methods=["POST"]),
        ]

    async def transcribe(self, request: Request) -> ASGIApp:
        return await self._respond(request, translate=False)

    async def translate(self, request: Request) -> ASGIApp:
        return await self._respond(request, translate=True)

    async def _respond(self, request: Request, translate: bool) -> ASGIApp:
        context = context_of(request.scope)
        self._lookup.check_room(context)
        form = await read_form(request, self._max_input_size)
        parsed = parse_transcription(form, request_id_of(request.scope), translate)
        record_body(request.scope, parsed.members)
        if parsed.warning:
            context.warn(parsed.warning)
        with model_field():
            model = await self._lookup.acquire(context, parsed.model or only_model(self._lookup))
        if "audio" not in model.config.media:
            raise field_error("model", f"'{model.config.name}' writes down no sounds")
        stream = model.generate(parsed.request)
        if parsed.stream:
            return EventStreamResponse(stream, TranscriptEvents())
        async with CancelOnDisconnect(request.receive), aclosing(stream):
            chunks = [chunk async for chunk in stream]
        return transcript_response(chunks, parsed, translate)
