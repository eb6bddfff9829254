"""Images at their places in a prompt: spans by runs of neighbouring places, and refusals by name."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from charonia.core.errors import InvalidArgument, QueueFull, RequestTimeout
from charonia.core.media import EMBEDS, MediaKind, MediaSource, PreparedMedium
from charonia.core.media import SOURCE as TEXT_INPUT
from charonia.core.media_models import EncodedMedium, MediaFacts, MediaServices
from charonia.core.metrics import Reading
from charonia.core.model import MemoryNeed, ReservedMemory
from charonia.core.request import ChatMessage, Conversation
from charonia.core.request_context import RequestContext
from charonia.engine.client.model_media import ModelMedia, PromptMedia, RowShape
from charonia.engine.core.messages import AddRequest
from charonia.scheduler.encoders.encoder_rows import EncoderRows
from charonia.scheduler.sequence import SequenceSpec
from charonia.tokenization.media_text import MediaText

TOKEN, HIDDEN = 9, 2
TEXT = MediaText({"image": "<i>"}, ())
TOKENS: Mapping[MediaKind, int] = {"image": TOKEN}


def medium(name: bytes, grid: tuple[int, int, int] = (0, 0, 0)) -> PreparedMedium:
    return PreparedMedium("image", name, "<i>", {}, grid)


def rows(length: int, first: float, layers: int = 0) -> EncodedMedium:
    numbers = np.arange(length * HIDDEN, dtype=np.float32) + first
    deep = np.concatenate([numbers + 100 * (layer + 1) for layer in range(layers)]) if layers else numbers[:0]
    return EncodedMedium(length, numbers.tobytes(), "float32", deep.tobytes())


def placed(media: PromptMedia, ids: list[int]) -> AddRequest:
    spec = SequenceSpec(key=0, prompt=np.array(ids, np.int32), max_tokens=1)
    return media.place(AddRequest(spec), Conversation((ChatMessage("user", ""),)))


def test_a_span_is_a_run_of_places_of_one_medium() -> None:
    media = PromptMedia(
        TEXT, TOKENS, (medium(b"a"), medium(b"b", (1, 1, 2))), encoded=(rows(3, 0.0, layers=2), rows(2, 50.0))
    )
    spans = placed(media, [1, TOKEN, TOKEN, 2, TOKEN, TOKEN, TOKEN, 3]).spec.embedded
    assert [(span.start, span.length) for span in spans] == [(1, 2), (4, 1), (5, 2)]
    assert [np.frombuffer(span.rows, np.float32).tolist() for span in spans] == [[0, 1, 2, 3], [4, 5], [50, 51, 52, 53]]
    assert np.frombuffer(spans[0].deepstack, np.float32).tolist() == [100, 101, 102, 103, 200, 201, 202, 203]
    assert np.frombuffer(spans[1].deepstack, np.float32).tolist() == [104, 105, 204, 205]
    assert spans[2].digest == b"b"
    assert spans[2].grid == (1, 1, 2)
    assert all(one.digest != other.digest for one, other in pairwise(spans))
    whole = placed(media._replace(prepared=media.prepared[:1], encoded=media.encoded[:1]), [TOKEN] * 3).spec.embedded
    assert [(span.digest, span.rows is media.encoded[0].rows) for span in whole] == [(b"a", True)]


@pytest.mark.parametrize("ids", [[1, TOKEN], [TOKEN] * 3, []])
def test_places_and_rows_are_as_many(ids: list[int]) -> None:
    media = PromptMedia(TEXT, TOKENS, prepared=(medium(b"a"),), encoded=(rows(2, 0.0),))
    with pytest.raises(InvalidArgument, match=rf"messages: it has {len(ids) - ids.count(1)} tokens .* and 2 of"):
        placed(media, ids)


def test_an_image_with_a_grid_is_in_one_piece() -> None:
    media = PromptMedia(TEXT, TOKENS, prepared=(medium(b"a", (1, 1, 2)),), encoded=(rows(2, 0.0),))
    with pytest.raises(InvalidArgument, match="side by side"):
        placed(media, [TOKEN, 1, TOKEN])


class _Parts:
    """A preparer and an encoder, which fail as they are told."""

    facts: Mapping[MediaKind, MediaFacts] = {"image": MediaFacts("<i>", (TOKEN,), b"")}
    needs: Sequence[MemoryNeed] = (MemoryNeed(5),)

    def __init__(self, failure: Exception | None = None, full: bool = False) -> None:
        self.failure, self.full = failure, full
        self.unloads = 0

    async def load(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def unload(self) -> None:
        self.unloads += 1

    def check(self, media: Sequence[MediaSource]) -> None:
        if self.full:
            raise QueueFull("too many", retry_after=1.0)

    async def prepare(self, source: MediaSource, context: RequestContext) -> PreparedMedium:
        return medium(source.uuid.encode())

    async def encode(self, prepared: PreparedMedium, context: RequestContext, salt: str = "") -> EncodedMedium:
        return rows(1, float(prepared.digest))

    def reserved_memory(self) -> ReservedMemory:
        return ReservedMemory(5, 3)

    def readings(self) -> Iterator[Reading]:
        yield Reading("a", 1)


def ignore(*_: Any) -> None:
    pass


SOURCE = MediaSource("image", uuid="1", field="messages[0].content[0]")
CHAT = Conversation((ChatMessage("user", "", media=(SOURCE,)),))


async def test_a_model_reads_the_media_of_its_prompts() -> None:
    parts = _Parts()
    media = ModelMedia(MediaServices(parts, parts), bidirectional=True)
    await media.load("m", ignore)
    assert media.kinds == {"image"}
    read = await media.read(CHAT, RequestContext("chat"), "")
    assert (read.text.tokens, read.text.placeholders) == ({"image": "<i>"}, (("image", "<i>"),))
    [span] = placed(read, [TOKEN]).spec.embedded
    assert span.bidirectional
    joint = media.memory_beside(parts)
    assert joint is not None
    assert joint.reserved_memory() == ReservedMemory(10, 6)
    with pytest.raises(InvalidArgument, match="it has 1 tokens"):
        placed(await media.read("text", RequestContext("chat"), ""), [TOKEN])
    parts.full = True
    with pytest.raises(QueueFull):
        await media.read(CHAT, RequestContext("chat"), "")


async def test_rows_that_were_encoded_elsewhere_pass_the_encoder_by() -> None:
    class Given(_Parts):
        widths: list[int] = []

        async def prepare(self, source: MediaSource, context: RequestContext) -> PreparedMedium:
            self.widths.append(source.width)
            numbers = np.arange(12, dtype=np.float16).reshape(2, 6)
            return PreparedMedium("image", b"a", "<i><i>", {EMBEDS: numbers}, (1, 1, 2))

    parts = Given()
    media = ModelMedia(MediaServices(parts, parts), rows=RowShape(HIDDEN, layers=2))
    await media.load("m", ignore)
    assert media.row_width == 6
    chat = Conversation((ChatMessage("user", "", media=(replace(SOURCE, encoded=True),)),))
    read = await media.read(chat, RequestContext("chat"), "")
    [span] = placed(read, [TOKEN, TOKEN]).spec.embedded
    assert (span.dtype, span.grid) == ("float16", (1, 1, 2))
    assert np.frombuffer(span.rows, np.float16).tolist() == [0, 1, 6, 7]
    assert np.frombuffer(span.deepstack, np.float16).tolist() == [2, 3, 8, 9, 4, 5, 10, 11]
    assert parts.widths == [6]
    other = ModelMedia(MediaServices(parts, parts))
    await other.load("m", ignore)
    with pytest.raises(InvalidArgument, match="takes none") as refusal:
        await other.read(chat, RequestContext("chat"), "")
    assert refusal.value.field == SOURCE.field
    assert parts.widths == [6], "before it is prepared"


async def test_preparing_and_encoding_count_for_a_requests_time() -> None:
    class Slow(_Parts):
        ended = 0

        async def encode(self, *_: Any) -> EncodedMedium:
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                self.ended += 1

    parts = Slow()
    media = ModelMedia(MediaServices(parts, parts))
    await media.load("m", ignore)
    context = RequestContext("chat")
    context.arrived_at -= 10.0
    for timeout in (9.0, 10.05):  # what is over before it begins, and while it is encoded
        with pytest.raises(RequestTimeout):
            await media.read(CHAT, context, "", timeout)
    assert parts.ended >= 1
    add = AddRequest(SequenceSpec(key=0, prompt=np.array([2], np.int32), max_tokens=1))
    with pytest.raises(RequestTimeout):
        await media.encode_source(add, (1, 2), context, 10.1)


async def test_a_model_that_lacks_what_images_need_reads_texts(caplog: pytest.LogCaptureFixture) -> None:
    parts = _Parts(InvalidArgument("no pillow"))
    media = ModelMedia(MediaServices(parts, parts))
    await media.load("m", ignore)
    assert "model 'm' takes no images: no pillow" in caplog.text
    assert media.kinds == frozenset()
    assert parts.unloads == 2
    with pytest.raises(InvalidArgument, match=r"messages\[0\].content\[0\]: this model takes no image \(no pillow\)$"):
        await media.read(CHAT, RequestContext("chat"), "")
    assert media.refusals == {"image": "no pillow"}
    assert await media.read("text", RequestContext("chat"), "") is None
    wrong = _Parts(InvalidArgument("no such setting", field="mm_processor_kwargs"))
    with pytest.raises(InvalidArgument, match="no such setting"):
        await ModelMedia(MediaServices(wrong, wrong)).load("m", ignore)
    assert wrong.unloads == 2
    broken = _Parts(MemoryError())
    with pytest.raises(MemoryError):
        await ModelMedia(MediaServices(broken, broken)).load("m", ignore)
    assert broken.unloads == 2


def test_a_refusal_does_not_tell_where_files_lie() -> None:
    reasons: Mapping[MediaKind, str] = {"image": "/models/m has no processor", "audio": "/models/m: no sounds"}
    media = ModelMedia(refusals=reasons, place="/models/m")
    assert media.refusals == {"image": "the checkpoint has no processor", "audio": "no sounds"}


async def test_a_text_that_is_read_apart_is_encoded_before_the_engine_has_it() -> None:
    read: list[Any] = []

    class Reader(_Parts):
        async def encode(self, prepared: Any, context: RequestContext, salt: str = "") -> EncodedMedium:
            read.append((prepared.inputs[TEXT_INPUT].tolist(), salt))
            return rows(3, 1.0)

    media = ModelMedia(MediaServices(None, Reader(), (), attended=True))
    await media.load("m", ignore)
    assert (media.kinds, media.transcribes) == (frozenset(), False)
    add = AddRequest(SequenceSpec(key=0, prompt=np.array([2], np.int32), max_tokens=1, salt="s"))

    async def encode(*prompt: int) -> EncoderRows:
        asked = await media.encode_source(add, prompt, RequestContext("completion"))
        assert asked.prompt_tokens == len(prompt)
        assert asked.spec.encoded is not None
        return asked.spec.encoded

    made = await encode(5, 6, 7)
    assert made == EncoderRows(3, made.digest, rows(3, 1.0).rows, "float32", 3)
    assert read == [([[5, 6, 7]], "s")]
    assert (await encode(5, 6, 7)).digest == made.digest
    assert (await encode(5, 6)).digest != made.digest
    with pytest.raises(InvalidArgument, match="takes no image"):
        await media.read(CHAT, RequestContext("chat"), "")
    await media.unload()


async def test_who_leaves_ends_what_is_prepared_for_him() -> None:
    ended = []

    class Slow(_Parts):
        async def prepare(self, source: MediaSource, context: RequestContext) -> PreparedMedium:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(source.uuid)
            return medium(b"")

    parts = Slow()
    media = ModelMedia(MediaServices(parts, parts))
    await media.load("m", ignore)
    other = replace(SOURCE, uuid="2")
    chat = Conversation((ChatMessage("user", "", media=(SOURCE, other)),))
    reading = asyncio.create_task(media.read(chat, RequestContext("chat"), ""))
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(ended) == ["1", "2"]


async def test_the_first_error_ends_the_others() -> None:
    ended = []

    class Picky(_Parts):
        async def prepare(self, source: MediaSource, context: RequestContext) -> PreparedMedium:
            if source.uuid == "2":
                raise InvalidArgument("broken", field=source.field)
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(source.uuid)
            return medium(b"")

    parts = Picky()
    media = ModelMedia(MediaServices(parts, parts))
    await media.load("m", ignore)
    chat = Conversation((ChatMessage("user", "", media=(SOURCE, replace(SOURCE, uuid="2"))),))
    with pytest.raises(InvalidArgument, match="broken"):
        await media.read(chat, RequestContext("chat"), "")
    assert ended == ["1"]


async def test_what_the_tower_refuses_has_its_place() -> None:
    class Narrow(_Parts):
        async def encode(self, prepared: PreparedMedium, context: RequestContext, salt: str = "") -> EncodedMedium:
            raise InvalidArgument("the tower refuses it")

    parts = Narrow()
    media = ModelMedia(MediaServices(parts, parts))
    await media.load("m", ignore)
    chat = Conversation((ChatMessage("user", "", media=(SOURCE,)),))
    with pytest.raises(InvalidArgument) as refusal:
        await media.read(chat, RequestContext("chat"), "")
    assert (refusal.value.field, refusal.value.message) == (SOURCE.field, f"{SOURCE.field}: the tower refuses it")
