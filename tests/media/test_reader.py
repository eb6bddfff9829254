"""The reader over real processes: what becomes of images, and of files that are none."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import safetensors.numpy
from msgspec.structs import replace

from charonia.core.errors import InvalidArgument, NotReady, QueueFull, Unavailable
from charonia.core.media import MediaSource, PreparedMedium
from charonia.core.media_models import MediaConfig
from charonia.media.encoded_file import blank_image, read_rows
from charonia.media.limits import MediaLimits
from charonia.media.preparing_process import PreparedAnswer, make_answer
from charonia.media.reader import MediaReader
from charonia.processes.child_process import anonymous_file
from charonia.processes.patient_work import patient_work

from ..image_processors import write_processor
from ..waiting import until
from .hostile_files import hostile_files, png
from .pictures import context, file_of, picture, source

pytestmark = pytest.mark.asyncio(loop_scope="module")
FIELD = "messages[0].content[0].image_url"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor(tmp_path_factory.mktemp("checkpoint"), "qwen2-vl")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(checkpoint: Path) -> AsyncIterator[MediaReader]:
    config = MediaConfig(processes=1, max_pixels=1 << 22, cache_bytes=2 << 20, per_prompt={"image": 3})
    reader = MediaReader(str(checkpoint), MediaLimits(config, max_waiting=8, memory=40 << 20, seconds=10))
    with pytest.raises(NotReady):
        _ = reader.facts
    await reader.load()
    yield reader
    await reader.unload()
    assert reader.processes == 0
    assert not patient_work.waits


def series(reader: MediaReader) -> dict[str, Any]:
    return {reading.labels.get("outcome", reading.family): reading.value for reading in reader.readings()}


async def test_an_image_is_ready_for_the_encoder(reader: MediaReader) -> None:
    assert (reader.facts["image"].token, len(reader.facts["image"].token_ids)) == ("<|image_pad|>", 1)
    medium = await reader.prepare(source(file_of(picture(90, 50))), context())
    assert medium.grid == (1, 2, 3)
    assert medium.placeholder == "<|image_pad|>" * 6
    assert {name: array.shape for name, array in medium.inputs.items()} == {
        "pixel_values": (24, 3 * 2 * 14 * 14),
        "image_grid_thw": (1, 3),
    }
    assert medium.inputs["pixel_values"].dtype == np.float32
    assert all(array.flags.owndata or array.base.flags.owndata for array in medium.inputs.values())


async def test_preparing_gives_way_to_steps_that_decode(reader: MediaReader) -> None:
    [worker] = reader._running
    pid = worker._process._process.pid
    assert (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)) == (os.SCHED_IDLE, 19)


async def test_a_content_is_prepared_once_for_each_tenant(reader: MediaReader) -> None:
    data, before = file_of(picture(seed=1)), series(reader)["prepared"]
    together = await asyncio.gather(*(reader.prepare(source(data), context("a")) for _ in range(4)))
    again = await reader.prepare(source(data), context("a"))
    assert all(medium is again for medium in together)
    seconds = series(reader)["charonia_media_seconds_total"]
    other = await reader.prepare(source(data), context("b"))
    assert series(reader)["charonia_media_seconds_total"] > seconds
    assert other.digest != again.digest
    assert np.array_equal(other.inputs["pixel_values"], again.inputs["pixel_values"])
    assert series(reader)["prepared"] == before + 2


async def test_a_uuid_stands_for_what_came_with_it(reader: MediaReader) -> None:
    sent = await reader.prepare(source(file_of(picture(seed=2)), uuid="u"), context("a"))
    assert await reader.prepare(source(uuid="u"), context("a")) is sent
    for tenant, uuid in (("a", "v"), ("b", "u")):
        with pytest.raises(InvalidArgument, match=f"there is no image with uuid '{uuid}' here") as refusal:
            await reader.prepare(source(uuid=uuid), context(tenant))
        assert refusal.value.field == FIELD


async def test_a_request_says_how_large_its_images_become(reader: MediaReader) -> None:
    """Each is another picture to the encoder, and another content of the same name."""
    sent = source(file_of(picture(90, 50, seed=5)), uuid="sized")
    grids = {
        "": (1, 2, 3),
        '{"max_pixels":784}': (1, 1, 1),
        '{"min_pixels":9408}': (1, 3, 5),
        '{"size":{"longest_edge":784,"shortest_edge":784}}': (1, 1, 1),
    }
    made = {}
    for options, grid in grids.items():
        made[options] = await reader.prepare(replace(sent, options=options), context())
        assert made[options].grid == grid
    assert len({medium.digest for medium in made.values()}) == len(grids)
    for options, medium in made.items():
        assert await reader.prepare(replace(source(uuid="sized"), options=options), context()) is medium
    for options, grid in (
        ('{"do_sample_frames":true,"fps":1,"max_pixels":784,"num_frames":8}', (1, 1, 1)),
        ('{"max_pixels":784.0,"min_pixels":null}', (1, 1, 1)),
        ('{"size":{"height":null,"longest_edge":784.0,"shortest_edge":784}}', (1, 1, 1)),
        ('{"fps":"fast","max_pixels":null,"num_crops":null}', (1, 2, 3)),
    ):
        assert (await reader.prepare(replace(sent, options=options), context())).grid == grid, options
    for options, problem in (
        ('{"max_pixels":784.5}', "mm_processor_kwargs.max_pixels must be a positive whole number, got 784.5"),
        ('{"max_pixels":1e300}', "mm_processor_kwargs.max_pixels must be a positive whole number, got 1e"),
        ('{"max_pixels":-1e300}', "mm_processor_kwargs.max_pixels must be a positive whole number, got -1e"),
        ('{"size":{"longest_edge":null}}', "mm_processor_kwargs.size must be an object of positive whole numbers"),
        ('{"num_crops":4}', "mm_processor_kwargs.num_crops is none of this model's: min_pixels, max_pixels, size$"),
        ('{"max_pixels":0}', "mm_processor_kwargs.max_pixels must be a positive whole number, got 0"),
        ('{"max_pixels":true}', "mm_processor_kwargs.max_pixels must be a positive whole number, got true"),
        ('{"size":784}', "mm_processor_kwargs.size must be an object of positive whole numbers, got 784"),
        ('{"size":{"longest_edge":"784"}}', "mm_processor_kwargs.size must be"),
        ('{"min_pixels":1000000000}', "mm_processor_kwargs.min_pixels may be at most 12544, as this model is served"),
    ):
        with pytest.raises(InvalidArgument, match=problem) as refusal:
            await reader.prepare(replace(sent, options=options), context())
        assert (refusal.value.field, refusal.value.message.find("mm_processor")) == ("mm_processor_kwargs", 0)
    with pytest.raises(InvalidArgument, match="num_crops is none") as refusal:
        await reader.prepare(source(b"no image", options='{"num_crops":4}'), context())
    assert refusal.value.field == "mm_processor_kwargs"


async def test_options_cost_no_worker_its_life(tmp_path: Path) -> None:
    """Transformers goes through all pairs of as many tiles as are asked for."""
    limits = MediaLimits(MediaConfig(processes=1), max_waiting=8, seconds=10)
    reader = MediaReader(str(write_processor(tmp_path, "internvl")), limits)
    await reader.load()
    try:
        workers = set(reader._running)
        sent = source(file_of(picture(90, 50)))
        for options in ('{"max_patches":1000000}', '{"min_patches":1000000}'):
            with pytest.raises(InvalidArgument, match="patches may be at most 4, as this model is served"):
                await reader.prepare(replace(sent, options=options), context())
        await reader.prepare(replace(sent, options='{"max_patches":4}'), context())
        assert reader._running == workers
        assert all(worker.alive for worker in workers)
    finally:
        await reader.unload()


async def test_a_tenant_named_as_anothers_options_finds_none_of_its_images(reader: MediaReader) -> None:
    options = '{"max_pixels":784}'
    sent = source(file_of(picture(seed=6)), uuid="joined", options=options)
    small = await reader.prepare(sent, context("a"))
    with pytest.raises(InvalidArgument, match="there is no image with uuid 'joined' here"):
        await reader.prepare(source(uuid="joined"), context(f"a{options}"))
    assert await reader.prepare(source(uuid="joined", options=options), context("a")) is small


def rows_file(count: int, seed: int = 0, **others: Any) -> bytes:
    rows = np.random.default_rng(seed).standard_normal((count, 4), np.float32)
    return safetensors.numpy.save({"image_embeds": rows} | others)


async def test_a_grid_tells_the_texts_between_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the processor puts between those of an image of its size."""
    limits = MediaLimits(MediaConfig(processes=1, max_pixels=1 << 20), max_waiting=8, memory=40 << 20, seconds=10)
    reader = MediaReader(str(write_processor(tmp_path, "pixtral")), limits)
    await reader.load()

    def make_blank(*size: int) -> bytes:
        assert threading.current_thread() is not threading.main_thread(), "a large one takes the loop's time"
        return blank_image(*size)

    monkeypatch.setattr("charonia.media.reader.blank_image", make_blank)

    async def text(rows: int, *grid: int) -> str:
        medium = source(rows_file(rows, image_grid_thw=np.array([grid])), encoded=True)
        return (await reader.prepare(medium, context())).placeholder

    assert await text(6, 1, 4, 6) == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert await text(5, 1, 4, 6) == ""
    for grid in ((1, 4000, 40), (2, 4, 6), (1, 0, 6)):
        with pytest.raises(InvalidArgument, match=r"image_grid_thw .* is none of an image of at most 1,048,576 pixels"):
            await text(6, *grid)
    with pytest.raises(InvalidArgument, match="one side may be at most 200 times the other"):
        await text(6, 1, 1, 400)
    await reader.unload()


async def test_what_was_encoded_elsewhere_has_places_as_an_image_has(reader: MediaReader) -> None:
    assert (reader.facts["image"].row_text, reader.facts["image"].gridded) == (("", "<|image_pad|>", ""), True)
    grid = {"image_grid_thw": np.array([[1, 4, 6]])}
    sent = await reader.prepare(source(rows_file(6, **grid), encoded=True, uuid="rows"), context("a"))
    assert (sent.placeholder, sent.grid, [*sent.inputs]) == ("<|image_pad|>" * 6, (1, 2, 3), ["image_embeds"])
    assert sent.inputs["image_embeds"].shape == (6, 4)
    again = await reader.prepare(source(rows_file(6, **grid), encoded=True), context("a"))
    assert again is sent is await reader.prepare(source(uuid="rows"), context("a"))
    turned = await reader.prepare(source(rows_file(6, **grid), encoded=True, grid=(1, 6, 4)), context("a"))
    assert turned.grid == (1, 3, 2)
    others = [
        await reader.prepare(source(rows_file(6, seed, **grid), encoded=True), context(tenant))
        for seed, tenant in ((1, "a"), (0, "b"))
    ]
    assert len({medium.digest for medium in (sent, turned, *others)}) == 4
    reader._cache.check_integrity()
    for data, width, complaint in (
        (rows_file(6), 4, "it needs image_grid_thw"),
        (rows_file(5, **grid), 4, "does not lead to its 5 rows"),
        (b"PK", 4, "it is a pickle"),
        (rows_file(6, seed=2, **grid), 6, "its rows have 4 numbers, and this model's have 6"),
    ):
        before = series(reader)["prepared"]
        with pytest.raises(InvalidArgument, match=complaint) as refusal:
            await reader.prepare(source(data, encoded=True, width=width), context())
        assert refusal.value.field == FIELD
        assert series(reader)["prepared"] == before, "and not kept"


async def test_rows_that_are_read_count_as_waiting(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = read_rows

    def read_and_look(*arguments: Any) -> Any:
        seen.append(reader.waiting)
        return read(*arguments)

    monkeypatch.setattr("charonia.media.reader.read_rows", read_and_look)
    grid = {"image_grid_thw": np.array([[1, 4, 6]])}
    await reader.prepare(source(rows_file(6, seed=3, **grid), encoded=True), context())
    assert (seen, reader.waiting) == ([1], 0)


async def test_steps_leave_time_for_preparing_and_not_for_fetching(
    reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that comes slowly needs no processor."""
    seen: list[bool] = []

    async def read_and_look(medium: MediaSource) -> bytes:
        seen.append(patient_work.waits)
        return medium.data

    def run_and_look(job: Any) -> PreparedMedium:
        seen.append(patient_work.waits)
        return run(job)

    run = reader._run
    monkeypatch.setattr(reader._files, "read", read_and_look)
    monkeypatch.setattr(reader, "_run", run_and_look)
    await reader.prepare(source(file_of(picture(91, 50))), context())
    with pytest.raises(InvalidArgument):
        await reader.prepare(source(b"no image"), context())
    assert (seen, patient_work.waits) == ([False, True] * 2, False)


async def test_what_is_kept_has_a_budget(reader: MediaReader) -> None:
    for seed in range(12):
        await reader.prepare(source(file_of(picture(120, 120, seed))), context())
        reader._cache.check_integrity()
    assert 1 << 20 < series(reader)["charonia_media_cache_bytes"] <= 2 << 20


async def test_a_prompt_has_so_many_and_no_more(reader: MediaReader) -> None:
    reader.check([source()] * 3)
    with pytest.raises(InvalidArgument, match="a prompt may have at most 3 of the kind image"):
        reader.check([source()] * 4)


async def test_a_full_queue_refuses_and_says_so(reader: MediaReader) -> None:
    """Those that wait are counted, and leave when nobody wants them any more."""
    before = series(reader)["refused"]
    async with reader._places:  # as if an image were being prepared
        files = [file_of(picture(seed=100 + seed)) for seed in range(7)]
        tasks = [asyncio.create_task(reader.prepare(source(data), context())) for data in files]
        await until(lambda: len(reader._under_way) == 7)
        assert reader.waiting == series(reader)["charonia_media_waiting"] == 7
        with pytest.raises(QueueFull, match="7 images wait to be prepared already"):
            reader.check([source(), source()])
        assert series(reader)["refused"] == before + 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not reader.waiting)
        assert not reader._under_way
    assert (await reader.prepare(source(file_of(picture(seed=3))), context())).grid


async def test_one_client_leaves_and_another_stays(reader: MediaReader) -> None:
    data = file_of(picture(seed=50))
    await reader._places.acquire()
    leaves, stays = (asyncio.create_task(reader.prepare(source(data), context())) for _ in range(2))
    await until(lambda: bool(reader._under_way))
    leaves.cancel()
    reader._places.release()
    assert (await stays).inputs
    assert leaves.cancelled()


async def prepared(reader: MediaReader, data: bytes) -> PreparedMedium | str:
    try:
        return await reader.prepare(source(data), context())
    except InvalidArgument as error:
        return f"{error.field}, {error.message}"


async def test_hostile_files_are_refused_by_their_fault_or_give_the_right_picture(reader: MediaReader) -> None:
    """None of them costs more than its own refusal: the process that begins with them ends with them."""
    [worker] = reader._running
    hostile, pictures = list(hostile_files()), 0
    assert len({file.data for file in hostile}) >= 200
    for file in hostile:
        result = await prepared(reader, file.data)
        if isinstance(result, str):
            assert result.startswith((f"{FIELD}, {FIELD}: the ", f"{FIELD}, {FIELD}: decoding ")), file.name
            assert len(result) < 500, file.name
            continue
        pictures += 1
        assert result.inputs["pixel_values"].nbytes < 1 << 20, file.name
        if file.of:
            whole = await prepared(reader, file.of)
            assert isinstance(whole, PreparedMedium)
            assert np.array_equal(result.inputs["pixel_values"], whole.inputs["pixel_values"]), file.name
    assert 20 < pictures < len(hostile) / 2
    assert reader._running == {worker}
    assert worker.alive


async def test_a_file_that_takes_too_much_memory_is_refused_and_others_go_on(reader: MediaReader) -> None:
    rows = (b"\0" + bytes(3 * 2048)) * 2048
    refusal = await prepared(reader, png(2048, 2048, rows))
    assert isinstance(refusal, str)
    assert "memory" in refusal
    assert isinstance(await prepared(reader, file_of(picture())), PreparedMedium)


async def test_a_process_that_takes_too_long_is_ended(reader: MediaReader) -> None:
    [worker] = reader._running
    worker._limits = MediaLimits(seconds=0.001)
    assert await prepared(reader, file_of(picture(1000, 1000))) == (
        f"{FIELD}, {FIELD}: preparing the image takes more than 0.001 s"
    )
    assert not worker.alive
    assert reader.processes == 0


async def test_a_checkpoint_without_a_processor_is_refused_when_it_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    reader = MediaReader(str(tmp_path), MediaLimits())
    with pytest.raises(InvalidArgument, match=r"has no processor of images: no processor_config\.json or"):
        await reader.load()
    assert reader.processes == 0
    with pytest.raises(Unavailable):
        await reader._share(b"", MediaSource("image", field=FIELD), file_of(picture()))


async def test_a_reader_that_is_closed_meanwhile_says_so(checkpoint: Path) -> None:
    reader = MediaReader(str(checkpoint), MediaLimits(MediaConfig(processes=1)))
    loading = asyncio.create_task(reader.load())
    await until(lambda: reader.processes)
    await reader.unload()
    with pytest.raises(Unavailable):
        await loading
    with pytest.raises(Unavailable):
        await reader.prepare(source(file_of(picture())), context())
    await reader.unload()
    assert reader.processes == 0


async def test_a_server_without_pillow_names_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where everything else is as in one that prepares images."""
    monkeypatch.setitem(sys.modules, "torch", object())
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "charonia.media.image_file", raising=False)
    memory = anonymous_file("charonia-test")
    os.ftruncate(memory, 4096)
    for name in ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
    answer = make_answer(str(checkpoint), MediaLimits(max_output=4096), memory)
    os.close(memory)
    error = msgspec.msgpack.decode(answer(b""), type=PreparedAnswer).error
    assert error is not None
    assert error.message == "images need the package pillow, which is not installed: pip install '.[media]'"
