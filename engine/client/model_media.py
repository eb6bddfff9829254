"""The media of a language model's requests: prepared and encoded while the request waits; they are then put at their
places, and windows of sounds that no prompt has are handed to what writes them down.

Knows no processor, no tower and no protocol: both are contracts of core.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from ...core.backends import OnProgress
from ...core.errors import InvalidArgument, Unsupported
from ...core.media import (
    EMBEDS,
    FEATURES,
    SOURCE,
    WINDOW_BOUNDS,
    MediaKind,
    MediaSource,
    PreparedMedium,
    SourceText,
    plural_nouns,
)
from ...core.media_models import AlignedWindow, EncodedMedium, MediaEncoder, MediaPreparer, MediaServices
from ...core.metrics import Reading
from ...core.model import MemoryHolder, ReservedMemory
from ...core.request import Conversation, Prompt, prompt_media
from ...core.request_context import RequestContext
from ...scheduler.encoders.encoder_rows import EmbeddedSpan, EncoderRows
from ...tokenization.media_text import MediaText
from ..core.messages import AddRequest
from .transcript import SoundWindow

log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_GRID = (0, 0, 0)


_DTYPES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}
"""The dtypes of rows that were encoded elsewhere: numpy's -> torch's."""


class RowShape(NamedTuple):
    """The rows of a language model's places."""

    hidden: int
    layers: int = 0
    """How many of its first layers take more of an image."""

    @property
    def width(self) -> int:
        """Numbers of a row that was encoded elsewhere: what stands in the prompt, then what each of these layers
        takes."""
        return self.hidden * (1 + self.layers)

    def encoded(self, medium: PreparedMedium) -> EncodedMedium:
        """The rows of a medium that was encoded elsewhere."""
        rows = medium.inputs[EMBEDS]
        length = len(rows)
        parts = rows.reshape(length, 1 + self.layers, self.hidden).swapaxes(0, 1)
        return EncodedMedium(length, parts[0].tobytes(), _DTYPES[rows.dtype.name], parts[1:].tobytes())


class PromptMedia(NamedTuple):
    """The media of one prompt, ready to stand in it."""

    text: MediaText
    """What stands for them in the prompt's text."""
    tokens: Mapping[MediaKind, int]
    """By kind the token at whose places their rows stand."""
    prepared: Sequence[PreparedMedium] = ()
    encoded: Sequence[EncodedMedium] = ()
    bidirectional: bool = False

    def place(self, add: AddRequest, prompt: Prompt) -> AddRequest:
        """The request for a sequence, with the rows at the places of its prompt. Raises `InvalidArgument` by the field
        of `prompt` unless it has a place for each row, and no other."""
        spans: list[EmbeddedSpan] = []
        for kind, token in self.tokens.items():
            places = np.flatnonzero(add.spec.prompt == token).tolist()
            media = [both for both in zip(self.prepared, self.encoded, strict=True) if both[0].kind == kind]
            rows = sum(encoded.length for _, encoded in media)
            if len(places) != rows:
                field = "messages" if isinstance(prompt, Conversation) else "prompt"
                nouns = plural_nouns((kind,))
                message = f"it has {len(places)} tokens that stand for parts of {nouns} (id {token}), and {rows} of"
                raise InvalidArgument(f"{field}: {message} its {nouns}", field=field)
            begin = 0
            for prepared, encoded in media:
                spans.extend(self._runs(places[begin : begin + encoded.length], prepared, encoded))
                begin += encoded.length
        spans.sort(key=lambda span: span.start)
        return replace(add, spec=replace(add.spec, embedded=tuple(spans))) if spans else add

    def _runs(self, places: list[int], prepared: PreparedMedium, encoded: EncodedMedium) -> Iterator[EmbeddedSpan]:
        """A span for each run of neighbouring places of a medium."""
        length = len(places)
        ends = [index for index in range(1, length) if places[index] != places[index - 1] + 1]
        if ends and prepared.grid != _NO_GRID:
            raise InvalidArgument("messages: the places of an image are not side by side", field="messages")
        if not ends:
            yield self._span(places[0], encoded, prepared)
            return
        width = len(encoded.rows) // length
        layers = range(0, len(encoded.deepstack) // width, length)
        for first, end in zip([0, *ends], [*ends, length], strict=True):
            part = EncodedMedium(
                end - first,
                encoded.rows[first * width : end * width],
                encoded.dtype,
                b"".join(encoded.deepstack[(at + first) * width : (at + end) * width] for at in layers),
            )
            bounds = first.to_bytes(4, "little") + end.to_bytes(4, "little")
            digest = sha256(prepared.digest + bounds).digest()
            yield self._span(places[first], part, replace(prepared, digest=digest))

    def _span(self, start: int, encoded: EncodedMedium, prepared: PreparedMedium) -> EmbeddedSpan:
        return EmbeddedSpan(
            start,
            encoded.length,
            prepared.digest,
            encoded.rows,
            encoded.dtype,
            prepared.grid,
            self.bidirectional and prepared.kind == "image",
            encoded.deepstack,
        )


class ModelMedia:
    """The media of a model's prompts, from its load to its unload. Without `services` it takes none. `bidirectional`:
    the places of an image see one another. `plain`: of a model whose prompts with media go to another process. `rows`:
    those of its images, if some that were encoded elsewhere are taken. `refusals`: by a kind that it does not take,
    why, if its files, which lie at `place`, have something for it."""

    def __init__(
        self,
        services: MediaServices | None = None,
        bidirectional: bool = False,
        plain: PromptMedia | None = None,
        rows: RowShape | None = None,
        refusals: Mapping[MediaKind, str] = {},
        place: str = "",
    ) -> None:
        self._services = services
        self._place = place
        self.refusals: dict[MediaKind, str] = {}
        """By a kind that prompts may not have, why, as clients are told it, where there is more to say than that."""
        for kind, reason in refusals.items():
            self._refuse(kind, reason)
        self._rows = rows
        self._bidirectional = bidirectional
        self.plain = plain
        """What a prompt without media has, once they are loaded; None of a model without a token that stands for
        some."""

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds that prompts may have."""
        return frozenset() if self._services is None else frozenset(self._services.kinds)

    @property
    def row_width(self) -> int:
        """Numbers of a row of an image that was encoded elsewhere; 0 where none is taken."""
        return 0 if self._rows is None or "image" not in self.kinds else self._rows.width

    @property
    def transcribes(self) -> bool:
        """Whether sounds are written down, and nothing else is asked of the model."""
        return self._services is not None and self._services.attended and bool(self.kinds)

    async def load(self, name: str, on_progress: OnProgress) -> None:
        """Load what media need. A model `name` that lacks some of it serves texts alone, and the log says
        why. Raises what else the parts do, an error that names an option among it, and leaves nothing running."""
        if self._services is None:
            return
        began = time.monotonic()
        try:
            await _all([part.load() for part in self._parts])
        except BaseException as error:
            await self.unload()
            if self._services.attended or not isinstance(error, (InvalidArgument, Unsupported)) or error.field:
                raise
            log.warning("model '%s' takes no %s: %s", name, plural_nouns(self._services.kinds), error.message)
            for kind in self._services.kinds:
                self._refuse(kind, error.message)
            self._services = None
            return
        if (preparer := self._services.preparer) is not None:
            tokens = {kind: facts.token_ids[0] for kind, facts in preparer.facts.items() if facts.token_ids}
            self.plain = PromptMedia(_text_of(preparer, ()), tokens) if tokens else None
        nouns = plural_nouns(self._services.kinds) or "texts"
        on_progress(nouns, 1.0, time.monotonic() - began, "processor and tower")

    async def unload(self) -> None:
        await asyncio.gather(*(part.unload() for part in self._parts))

    @property
    def _parts(self) -> Sequence[MediaPreparer | MediaEncoder]:
        parts = () if self._services is None else (self._services.preparer, self._services.encoder)
        return [part for part in parts if part is not None]

    def memory_beside(self, engine: MemoryHolder | None) -> MemoryHolder | None:
        """The holder of the engine's memory and that of media together; None if the engine's is not known."""
        return engine if engine is None or self._services is None else _JointMemory(engine, self._services.encoder)

    def readings(self) -> Iterator[Reading]:
        for part in self._parts:
            yield from part.readings()

    async def text(self, prompt: Prompt, context: RequestContext) -> MediaText | None:
        """What stands for the media of a prompt in its text, if anything can. Raises as `read`."""
        services = self._checked(prompt_media(prompt))
        if services is None or services.preparer is None:
            return None if self.plain is None else self.plain.text
        return _text_of(services.preparer, await self._prepare(services.preparer, prompt_media(prompt), context))

    async def read(
        self, prompt: Prompt, context: RequestContext, salt: str, timeout: float = 0.0
    ) -> PromptMedia | None:
        """Prepare and encode the media of a prompt, together with those of others; `plain` where it has none. The
        request may take `timeout` seconds, 0 is any time. Cancelling it ends all that nobody else waits for. Raises as
        the parts do, `RequestTimeout`, and `InvalidArgument` for media that the model does not take."""
        return await context.in_time(self._read(prompt, context, salt), timeout)

    async def _read(self, prompt: Prompt, context: RequestContext, salt: str) -> PromptMedia | None:
        media = prompt_media(prompt)
        services, plain = self._checked(media), self.plain
        if not media or plain is None or services is None or services.preparer is None:
            return plain
        prepared = await self._prepare(services.preparer, media, context)
        works = [
            self._encode_at(source.field, medium, context, salt) for source, medium in zip(media, prepared, strict=True)
        ]
        encoded = await _all(works)
        return PromptMedia(_text_of(services.preparer, prepared), plain.tokens, prepared, encoded, self._bidirectional)

    async def _encode_at(
        self, field: str, prepared: PreparedMedium, context: RequestContext, salt: str
    ) -> EncodedMedium:
        try:
            return await self._encode(prepared, context, salt)
        except InvalidArgument as error:
            raise InvalidArgument(f"{field}: {error.message}", field=field) from error

    async def _encode(self, prepared: PreparedMedium, context: RequestContext, salt: str) -> EncodedMedium:
        if EMBEDS not in prepared.inputs:
            return await self.encode(prepared, context, salt)
        assert self._rows is not None
        return self._rows.encoded(prepared)

    async def prepare_sound(
        self, sound: MediaSource, context: RequestContext
    ) -> list[tuple[SoundWindow, PreparedMedium]]:
        """The windows of a sound, each with what the encoder takes. Raises `InvalidArgument` by the sound's field, and
        `QueueFull`."""
        assert self._services is not None
        assert self._services.preparer is not None
        prepared = await self._services.preparer.prepare(sound, context)
        features, bounds = prepared.inputs[FEATURES], prepared.inputs[WINDOW_BOUNDS].tolist()
        windows: list[tuple[SoundWindow, PreparedMedium]] = []
        for index, (begin, end) in enumerate(bounds):
            digest = sha256(prepared.digest + index.to_bytes(4, "little")).digest()
            inputs = {FEATURES: features[index : index + 1].copy()}  # freed with the window
            windows.append((SoundWindow(begin, end), PreparedMedium("audio", digest, "", inputs)))
        return windows

    async def encode_source(
        self, add: AddRequest, prompt: Sequence[int], context: RequestContext, timeout: float = 0.0
    ) -> AddRequest:
        """The request with what the encoder makes of the prompt, which it reads in the decoder's place. `timeout`: as
        of `read`. Raises as the encoder, and `RequestTimeout`."""
        assert self._services is not None
        tokens = np.array(prompt, np.int64)[None]
        text = SourceText(sha256(tokens.tobytes()).digest(), {SOURCE: tokens})
        output = await context.in_time(self._services.encoder.encode(text, context, add.spec.salt), timeout)
        encoded = EncoderRows(output.length, text.digest, output.rows, output.dtype, len(prompt))
        return replace(add, spec=replace(add.spec, encoded=encoded))

    async def encode(self, window: PreparedMedium, context: RequestContext, salt: str) -> EncodedMedium:
        """What the encoder makes of a window of a sound. Raises as the encoder."""
        assert self._services is not None
        return await self._services.encoder.encode(window, context, salt)

    async def align(self, window: AlignedWindow, context: RequestContext) -> Sequence[int]:
        """See `MediaEncoder.align`."""
        assert self._services is not None
        return await self._services.encoder.align(window, context)

    def _refuse(self, kind: MediaKind, reason: str) -> None:
        named = reason.removeprefix(f"{self._place}: ")
        self.refusals[kind] = named.replace(self._place, "the checkpoint") if self._place else named

    def _checked(self, media: Sequence[MediaSource]) -> MediaServices | None:
        for medium in media:
            if medium.kind not in self.kinds or self.transcribes:
                reason = self.refusals.get(medium.kind, "")
                message = f"{medium.field}: this model takes no {medium.kind}"
                raise InvalidArgument(f"{message} ({reason})" if reason else message, field=medium.field)
        return self._services

    async def _prepare(
        self, preparer: MediaPreparer, media: Sequence[MediaSource], context: RequestContext
    ) -> list[PreparedMedium]:
        sources = [self._with_width(medium) for medium in media]
        preparer.check(sources)
        return await _all([preparer.prepare(medium, context) for medium in sources])

    def _with_width(self, source: MediaSource) -> MediaSource:
        """The source, with the width of its rows if it was encoded elsewhere. Raises `InvalidArgument` where none are
        taken."""
        if not source.encoded:
            return source
        if self._rows is None:
            raise InvalidArgument(f"{source.field}: this model takes none", field=source.field)
        return replace(source, width=self._rows.width)


class _JointMemory:
    """The host's memory that several parts of a model hold: a `MemoryHolder`."""

    def __init__(self, *holders: MemoryHolder) -> None:
        self._holders = holders

    def reserved_memory(self) -> ReservedMemory:
        parts = [holder.reserved_memory() for holder in self._holders]
        return ReservedMemory(sum(part.promised for part in parts), sum(part.resident for part in parts))


def _text_of(preparer: MediaPreparer, prepared: Sequence[PreparedMedium]) -> MediaText:
    tokens = {kind: facts.token for kind, facts in preparer.facts.items()}
    return MediaText(tokens, tuple((medium.kind, medium.placeholder) for medium in prepared), True)


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
