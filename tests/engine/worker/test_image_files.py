"""The images of a rank on their way from and to a directory."""

from pathlib import Path

from charonia.engine.worker.fake_memory import FakeMemory
from charonia.engine.worker.image_files import ImageDirectorySettings, RankImages
from charonia.kvcache.exchange.directory_tier import DroppedImages
from charonia.kvcache.tiers.landed_images import ImagePlace


def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    settings = ImageDirectorySettings(str(tmp_path), 1 << 20, bytes(32))
    memory = FakeMemory(4, 0, check_contents=True)
    memory.allocate(2, 0, 0, 0)
    memory.slots[4:] = [5, 6, 7, 8]
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
