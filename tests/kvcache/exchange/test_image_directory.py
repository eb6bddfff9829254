"""Images in a directory: what comes back is what was written, or nothing, whatever happens to the files."""

import os
from pathlib import Path
from random import Random

import pytest

from charonia.kvcache.exchange.image_directory import ImageDirectory, ReadOutcome, share_name

SHARE = share_name(bytes(32))
SIZE = 1000


def key_of(number: int) -> bytes:
    return bytes([number]) * 32


def image_of(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def read(directory: ImageDirectory, key: bytes) -> bytes | ReadOutcome:
    into = bytearray(SIZE)
    outcome = directory.read(key, memoryview(into))
    return bytes(into) if outcome is ReadOutcome.READ else outcome


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_one_server_writes_another_reads(tmp_path: Path) -> None:
    ours, theirs = (ImageDirectory(tmp_path, SHARE, 1 << 20) for _ in range(2))
    assert read(theirs, key_of(1)) is ReadOutcome.MISSING
    assert ours.write(key_of(1), memoryview(image_of(1)))
    assert key_of(1) in theirs
    assert read(theirs, key_of(1)) == image_of(1)
    assert not theirs.write(key_of(1), memoryview(image_of(1)))
    assert len(files(tmp_path)) == 1


def test_shares_see_nothing_of_each_other(tmp_path: Path) -> None:
    ours, theirs = (ImageDirectory(tmp_path, share_name(bytes(32), rank, 2), 1 << 20) for rank in range(2))
    ours.write(key_of(1), memoryview(image_of(1)))
    assert read(theirs, key_of(1)) is ReadOutcome.MISSING


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "flipped", "header", "renamed"])
def test_a_damaged_file_is_a_miss_and_is_removed(tmp_path: Path, damage: str) -> None:
    directory = ImageDirectory(tmp_path, SHARE, 1 << 20)
    directory.write(key_of(1), memoryview(image_of(1)))
    (path,) = files(tmp_path)
    content, key = bytearray(path.read_bytes()), key_of(1)
    match damage:
        case "empty":
            content = bytearray()
        case "cut":
            content = content[:-1]
        case "longer":
            content += b"\0"
        case "flipped":
            content[-1] ^= 1
        case "header":
            content[0] ^= 1
        case "renamed":  # as an image of another block
            key = key_of(2)
            path = tmp_path / SHARE / key.hex()[:2] / key.hex()
            path.parent.mkdir()
    path.write_bytes(content)
    assert read(directory, key) is ReadOutcome.DAMAGED
    assert read(directory, key) is ReadOutcome.MISSING
    assert not path.exists()
    assert directory.write(key, memoryview(image_of(1)))
    assert read(directory, key) == image_of(1)


def test_the_oldest_by_use_make_room_and_the_budget_holds(tmp_path: Path) -> None:
    now = [1000.0]
    directory = ImageDirectory(tmp_path, SHARE, 16 * (SIZE + 48), clock=lambda: now[0])
    for number in range(16):
        now[0] += 1
        directory.write(key_of(number), memoryview(image_of(number)))
        path = tmp_path / SHARE / key_of(number).hex()[:2] / key_of(number).hex()
        os.utime(path, (now[0], now[0]))
    now[0] += 100
    os.utime(tmp_path / SHARE / "00" / key_of(0).hex(), (now[0], now[0]))  # it is used
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not ours")
    os.utime(foreign, (0, 0))
    for number in range(16, 20):
        directory.write(key_of(number), memoryview(image_of(number)))
        assert sum(path.stat().st_size for path in files(tmp_path) if path != foreign) <= 16 * (SIZE + 48)
    kept = [number for number in range(20) if key_of(number) in directory]
    assert kept[0] == 0
    assert {1, 2, 3} & {*kept} == set()
    assert {16, 17, 18, 19} <= {*kept}
    assert directory.evicted == 20 - len(kept)
    assert foreign.exists()
    with pytest.raises(OSError, match="larger than the directory's budget"):
        directory.write(key_of(30), memoryview(bytes(17 * SIZE)))


def test_reading_counts_as_use(tmp_path: Path) -> None:
    directory = ImageDirectory(tmp_path, SHARE, 1 << 20)
    directory.write(key_of(1), memoryview(image_of(1)))
    (path,) = files(tmp_path)
    os.utime(path, (5, 5))
    read(directory, key_of(1))
    assert path.stat().st_mtime > 5


def test_what_a_dead_server_left_half_written_goes(tmp_path: Path) -> None:
    directory = ImageDirectory(tmp_path, SHARE, 1 << 20)
    folder = tmp_path / SHARE / "00"
    folder.mkdir(parents=True)
    (folder / "a.part").write_bytes(b"half")
    (folder / "b.part").write_bytes(b"half")
    os.utime(folder / "a.part", (5, 5))
    directory.write(key_of(1), memoryview(image_of(1)))
    assert [path.name for path in files(tmp_path) if path.suffix] == ["b.part"]


def test_a_directory_that_cannot_be_read_fails_and_raises_nothing(tmp_path: Path) -> None:
    directory = ImageDirectory(tmp_path, SHARE, 1 << 20)
    path = tmp_path / SHARE / key_of(1).hex()[:2] / key_of(1).hex()
    path.mkdir(parents=True)
    assert read(directory, key_of(1)) is ReadOutcome.FAILED
