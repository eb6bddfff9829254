"""A tower with a memory: one computation for one content, within a budget, for one tenant; nothing is left over."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.isolated import isolated_runtime
from charonia.classic_backends.isolated.isolated_runtime import (
    EXECUTION_PARAMETER,
    ISOLATED,
    THREAD,
    InstanceLost,
    IsolatableLoader,
)
from charonia.classic_backends.tower import media_tower
from charonia.classic_backends.tower.media_tower import MediaTower
from charonia.classic_backends.tower.tower_backend import GPU_BATCH, tower_config
from charonia.core.errors import Internal, InvalidArgument, NotReady, Unavailable
from charonia.core.media import PreparedMedium
from charonia.core.media_models import EncodedMedium, TowerSpec
from charonia.core.model import ModelConfig
from charonia.core.request_context import RequestContext
from charonia.processes.patient_work import patient_work
from tests.seeing_models import write_seeing
from tests.waiting import until

ROW_BYTES = 4 * 64 * 4
"""Of one image of the tiny Llava."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("qwen"), "qwen3-vl")


def medium(number: int, size: int = 28) -> PreparedMedium:
    pixels = np.random.default_rng(number).standard_normal((1, 3, size, size)).astype(np.float32)
    return PreparedMedium("image", number.to_bytes(32, "little"), "<image>" * 4, {"pixel_values": pixels})


def context(tenant: str = "") -> RequestContext:
    made = RequestContext("chat")
    made.tenant = tenant
    return made


@asynccontextmanager
async def tower(
    directory: Path, images: int = 4, share: bool = False, execution: str = THREAD
) -> AsyncIterator[MediaTower]:
    spec = TowerSpec(str(directory), cache_bytes=images * ROW_BYTES, share_cache=share)
    made = MediaTower("llava", "1", spec, {EXECUTION_PARAMETER: execution})
    await made.load()
    try:
        yield made
        made.check_integrity()
    finally:
        await made.unload()
    made.check_integrity()
    assert not patient_work.waits


def counts(made: MediaTower) -> dict[str, float]:
    return {
        reading.family.removeprefix("charonia_tower_"): reading.value
        for reading in made.readings()
        if isinstance(reading.value, int | float)
    }


async def test_images_are_computed_once_for_each_content_tenant_and_salt(llava: Path) -> None:
    async with tower(llava) as made:
        first, again, other, salted = await asyncio.gather(
            made.encode(medium(1), context()),
            made.encode(medium(1), context()),
            made.encode(medium(1), context("acme")),
            made.encode(medium(1), context(), "salt"),
        )
        assert again is first
        assert other is not first
        assert other == salted == first
        assert await made.encode(medium(1), context("acme")) is other
        assert first.length == 4
        assert len(first.rows) == ROW_BYTES
        assert (first.dtype, first.deepstack) == ("float32", b"")
        found = counts(made)
        assert (found["images_total"], found["shared_total"], found["cache_hits_total"]) == (3, 1, 1)
        assert (found["cache_queries_total"], found["cache_bytes"]) == (5, 3 * ROW_BYTES)
        assert found["running"] == 0


async def test_steps_leave_time_for_what_is_computed_alone(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    async with tower(llava) as made:
        computed = made._computed

        async def compute_and_look(*arguments: Any, **named: Any) -> Any:
            seen.append(patient_work.waits)
            return await computed(*arguments, **named)

        monkeypatch.setattr(made, "_computed", compute_and_look)
        for size in (28, 28, 27):
            with suppress(InvalidArgument):
                await made.encode(medium(size, size), context())
            seen.append(patient_work.waits)
    assert seen == [True, False, False, True, False], "the second one is kept, and the last one refused"


async def test_memory_is_given_back_some_time_after(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that come by URL are small requests."""
    asked: list[bool] = []
    monkeypatch.setattr("charonia.classic_backends.tower.media_tower.release_memory_soon", lambda: asked.append(True))
    async with tower(llava) as made:
        for _ in range(2):
            await made.encode(medium(1), context())
        assert asked == [True], "the second one is kept"
        with pytest.raises(InvalidArgument):
            await made.encode(medium(2, size=30), context())
        assert asked == [True, True]


async def test_tenants_share_if_the_operator_says_so(llava: Path) -> None:
    async with tower(llava, share=True) as made:
        first = await made.encode(medium(1), context("acme"))
        assert await made.encode(medium(1), context("other")) is first


async def test_what_was_wanted_longest_ago_makes_room(llava: Path) -> None:
    async with tower(llava, images=2) as made:
        kept = await made.encode(medium(1), context())
        await made.encode(medium(2), context())
        assert await made.encode(medium(1), context()) is kept
        await made.encode(medium(3), context())
        assert await made.encode(medium(1), context()) is kept
        assert counts(made)["cache_evictions_total"] == 1
        assert made.reserved_memory().promised - made.reserved_memory().resident == 0
    async with tower(llava, images=0) as made:
        assert await made.encode(medium(1), context()) is not await made.encode(medium(1), context())


async def test_who_leaves_ends_the_computation_unless_another_waits(llava: Path) -> None:
    async with tower(llava) as made:
        leaver = asyncio.create_task(made.encode(medium(1), context()))
        stayer = asyncio.create_task(made.encode(medium(1), context()))
        lonely = asyncio.create_task(made.encode(medium(2), context()))
        await asyncio.sleep(0)
        leaver.cancel()
        lonely.cancel()
        assert isinstance((await asyncio.gather(leaver, stayer, lonely, return_exceptions=True))[1], EncodedMedium)
        assert counts(made)["running"] == 0
        assert (await made.encode(medium(2), context())).length == 4


async def test_errors_reach_all_who_wait_and_are_not_kept(llava: Path) -> None:
    async with tower(llava) as made:
        wrong = [made.encode(medium(1, size=30), context()) for _ in range(2)]
        errors = await asyncio.gather(*wrong, return_exceptions=True)
        assert all(isinstance(error, InvalidArgument) for error in errors)
        odd = PreparedMedium("image", b"odd", "", {"pixels": np.zeros(1)})
        with pytest.raises(InvalidArgument, match="'pixels'"):
            await made.encode(odd, context())
        waiting = asyncio.create_task(made.encode(medium(1), context()))
        await asyncio.sleep(0)
        await made.unload()
        with pytest.raises(Unavailable):
            await waiting


async def test_a_lost_process_is_named_as_what_encodes(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has sent an image knows nothing of instances, nor of an id of a tensors' request."""

    async def lost(inputs: Any, context: RequestContext, alone: bool) -> AsyncIterator[Any]:
        raise NotReady("[request id: <id_unknown>] the model's instances have ended unexpectedly")
        yield

    async with tower(llava) as made:
        monkeypatch.setattr(made, "_responses", lost)
        with pytest.raises(NotReady, match=r"^what encodes images for this model has ended"):
            await made.encode(medium(1), context())


async def test_the_time_to_restart_counts_from_the_loss_and_slows_nobody(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long an image has been queued."""
    now, waits = [1000.0], list[tuple[float, bool]]()
    monkeypatch.setattr(media_tower, "time", SimpleNamespace(monotonic=lambda: now[0]))
    errors: list[Exception] = [NotReady(""), InstanceLost(""), NotReady("")]
    async with tower(llava) as made:
        responses = made._responses

        async def failing(inputs: Any, context: RequestContext, alone: bool) -> AsyncIterator[Any]:
            now[0] += 61 if len(errors) == 3 else 10
            if errors:
                raise errors.pop(0)
            async for response in responses(inputs, context, alone):
                yield response

        async def works_again(seconds: float) -> bool:
            waits.append((seconds, patient_work.waits))
            return True

        monkeypatch.setattr(made, "_responses", failing)
        monkeypatch.setattr(made._model, "works_again_within", works_again)
        assert (await made.encode(medium(1), context())).length == 4
    assert waits == [(60.0, False), (40.0, False)]


def test_a_patient_process_is_waited_for_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in place of one that has ended, by which nobody has been slowed meanwhile."""
    seen: list[bool] = []
    monkeypatch.setattr(isolated_runtime, "IsolatedRuntime", lambda *_: seen.append(patient_work.waits))
    nothing: Any = SimpleNamespace()
    for loader in (isolated_runtime.PATIENT_TOWER, isolated_runtime.TOWER):
        loader.load(Path(), nothing, nothing, {})
    assert seen == [True, False]
    assert not patient_work.waits


@pytest.fixture
def dying(llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tower is a process of `dying_tower.py`."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(media_tower, "PATIENT_TOWER", IsolatableLoader("dying_tower:DYING", ISOLATED))
    for file in llava.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def loads(directory: Path) -> list[int]:
    """The processes that were loaded, by their ids."""
    return [int(line) for line in (directory / "loads").read_text().split()]


async def test_what_a_killed_process_computed_or_had_waiting_is_computed_by_the_next(dying: Path) -> None:
    (dying / "deaths").write_text("1")
    async with tower(dying, execution=ISOLATED) as made:
        encoded = await asyncio.gather(*(made.encode(medium(number), context()) for number in range(4)))
        assert [image.rows for image in encoded] == [
            medium(number).inputs["pixel_values"].ravel()[:1].tobytes() for number in range(4)
        ]
        assert len(loads(dying)) == 2
        os.kill(loads(dying)[-1], signal.SIGKILL)
        await until(lambda: made._model._pool.replacing)
        assert (await made.encode(medium(4), context())).length == 1, "what comes meanwhile waits"
        assert len(loads(dying)) == 3


async def test_what_ends_its_process_twice_is_refused_and_the_others_of_its_batch_are_not(
    dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batching(*arguments: Any) -> ModelConfig:
        config = tower_config(*arguments)
        return replace(config, max_batch_size=GPU_BATCH, raw={**config.raw, "max_batch_size": GPU_BATCH})

    monkeypatch.setattr(media_tower, "tower_config", batching)
    rows = [medium(number).inputs["pixel_values"].ravel()[:1].tobytes() for number in range(8)]
    (dying / "poison").write_bytes(rows[3])
    async with tower(dying, execution=ISOLATED) as made:
        encoded = await asyncio.gather(
            *(made.encode(medium(number), context()) for number in range(8)), return_exceptions=True
        )
        refused = encoded.pop(3)
        assert isinstance(refused, Internal)
        assert str(refused).startswith("what encodes images for this model has ended twice while it computed")
        assert [image.rows for image in encoded if isinstance(image, EncodedMedium)] == rows[:3] + rows[4:]
        batches = [int(line) for line in (dying / "batches").read_text().split()]
        assert max(batches[:2]) > 1, "others have been lost with it"
        assert len(loads(dying)) == 3


async def test_nobody_waits_for_ever_for_a_process_that_does_not_start_again(
    dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tower(dying, execution=ISOLATED) as made:
        (dying / "fails").touch()
        (dying / "deaths").write_text("1")
        waiting = asyncio.create_task(made.encode(medium(1), context()))
        await until(lambda: made._model._pool.replacing)
        monkeypatch.setattr(media_tower, "_RESTART_SECONDS", 0.0)
        with pytest.raises(NotReady, match=r"^what encodes images for this model has ended, and is being") as told:
            await made.encode(medium(2), context())
        assert told.value.retry_after > 0
        await made.unload()
        with pytest.raises(Unavailable, match="unloaded"):
            await waiting


@pytest.mark.parametrize("execution", [THREAD, pytest.param(ISOLATED, marks=pytest.mark.proof)])
async def test_packed_patches_of_any_size(qwen: Path, execution: str) -> None:
    def patches(number: int, height: int, width: int) -> PreparedMedium:
        pixels = np.random.default_rng(number).standard_normal((height * width, 1536)).astype(np.float32)
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]])}
        return PreparedMedium("image", bytes([number]), "", inputs, (1, height // 2, width // 2))

    media = [patches(1, 4, 6), patches(2, 2, 2), patches(3, 4, 6)]
    async with tower(qwen, images=100, execution=execution) as made:
        encoded = await asyncio.gather(*(made.encode(image, context()) for image in media))
        assert [image.length for image in encoded] == [6, 1, 6]
        assert [len(image.deepstack) for image in encoded] == [2 * 6 * 256, 2 * 256, 2 * 6 * 256]
    async with tower(qwen, images=0) as made:
        assert [await made.encode(image, context()) for image in media] == encoded
