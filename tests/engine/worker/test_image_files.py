"""The images of a rank on their way from and to a directory."""

from pathlib import Path

import pytest

from charonia.engine.worker import image_files
from charonia.engine.worker.fake_memory import FakeMemory
from charonia.engine.worker.image_files import ImageDirectorySettings, RankImages
from charonia.kvcache.exchange.directory_tier import DroppedImages
from charonia.kvcache.tiers.landed_images import ImagePlace


def fake_memory() -> FakeMemory:
    memory = FakeMemory(4, 0, check_contents=True)
    memory.allocate(2, 0, 0, 0)
    memory.slots[4:] = [5, 6, 7, 8]
    return memory


def test_what_is_not_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what finds no room among those that wait, and what the disk refuses; what is there already is."""
    settings = ImageDirectorySettings(str(tmp_path / "kv"), 1 << 20, bytes(32))
    images = RankImages(settings.share(0, 1), fake_memory().block_images, None)
    places = [ImagePlace(bytes([number]) * 32, 1) for number in range(2)]
    assert images.store(places[:1]).result(30) == [True]
    assert images.store(places).result(30) == [True, True]
    monkeypatch.setattr(image_files, "_MOST_UNWRITTEN_BYTES", 0)
    assert images.store(places).result(30) == [False, False]
    assert images.totals.unwritten == 2
    images.close()
    monkeypatch.undo()
    (tmp_path / "file").write_bytes(b"")
    refused = ImageDirectorySettings(str(tmp_path / "file"), 1 << 20, bytes(32))
    images = RankImages(refused.share(0, 1), fake_memory().block_images, None)
    assert images.store(places).result(30) == [False, False]
    assert images.totals.write_failures == 2
    images.close()


def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    settings = ImageDirectorySettings(str(tmp_path), 1 << 20, bytes(32))
    memory = fake_memory()
    images = RankImages(settings.share(0, 1), memory.block_images, None)
    images.store([ImagePlace(b"k" * 32, 1)])
    images.close()
    images = RankImages(settings.share(0, 1), memory.block_images, None)
    assert images.fetch([ImagePlace(b"k" * 32, 7)]).result() == [True]
    assert memory.block_images.landed.keys() == {7}
    assert memory.block_images.landed[7].numbers.tolist() == [5, 6, 7, 8]
    images.drop(DroppedImages([7, 8], []))
    assert memory.block_images.landed == {}
    images.close()
