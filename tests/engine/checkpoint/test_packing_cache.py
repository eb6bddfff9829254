"""Packed weights on disk: what is found again, what is not, and what a damaged or foreign file does."""

import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.cli.app import app
from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.packing_cache import Packing, PackingCache, open_packing_cache, packing_key
from charonia.engine.checkpoint.weights import WeightLoader
from charonia.engine.cpu import library
from charonia.engine.cpu.matmul import PackedMatmul
from charonia.engine.models.registry import checkpoint_builder

ARRAYS = {"lines": np.arange(5000, dtype=np.uint8), "scales": np.arange(7, dtype=np.float32)}


@pytest.fixture
def cache(tmp_path: Path) -> PackingCache:
    return open_packing_cache(tmp_path / "packed", 1 << 20)


def keep(cache: PackingCache, key: str, size: int = 5000) -> None:
    packing = Packing(cache, key, f"the model {key}")
    packing.add("a matrix", "int8", {**ARRAYS, "lines": np.arange(size, dtype=np.uint8)})
    packing.keep()


def only_file(cache: PackingCache) -> Path:
    [entry] = cache.entries()
    return entry.path


def test_what_is_kept_is_found_again(cache: PackingCache) -> None:
    keep(cache, "one")
    found = Packing(cache, "one").find("a matrix")
    assert found is not None
    kept, arrays = found
    assert kept == "int8"
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
    assert arrays["lines"].ctypes.data % 64 == 0
    assert Packing(cache, "another").find("a matrix") is None


def test_only_the_owner_reads_it(cache: PackingCache) -> None:
    keep(cache, "one")
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(cache).stat().st_mode) == 0o600


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(InvalidArgument, match="nobody else may write to it"):
        open_packing_cache(tmp_path, 1)


@pytest.mark.parametrize("damage", ["header", "end", "other"])
def test_a_damaged_file_is_removed_and_said(cache: PackingCache, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    keep(cache, "one")
    path = only_file(cache)
    data = bytearray(path.read_bytes())
    data[100] ^= damage == "header"
    path.write_bytes({"header": data, "end": data[:-4096], "other": b"something else"}[damage])
    assert not Packing(cache, "one").found
    assert "made again" in caplog.text
    assert not path.exists()


def test_the_oldest_make_room(cache: PackingCache) -> None:
    for number, key in enumerate(("old", "used", "young")):
        keep(cache, key, 300_000)
        os.utime(cache.directory / f"{key}.packed", (number, number))
    assert Packing(cache, "old").found, "and so it is the one used last"
    keep(cache, "new", 300_000)
    assert {entry.about for entry in cache.entries()} == {"the model old", "the model young", "the model new"}


def test_what_is_larger_than_the_budget_is_not_kept(cache: PackingCache, caplog: pytest.LogCaptureFixture) -> None:
    keep(cache, "one")
    keep(cache, "vast", 1 << 20)
    assert [entry.about for entry in cache.entries()] == ["the model one"]
    assert "--cache-max-bytes 1048576" in caplog.text


def test_a_disk_that_refuses_costs_nothing_else(
    cache: PackingCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    keep(cache, "one")
    assert list(cache.directory.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_parts_of_writers_that_died_are_removed(cache: PackingCache) -> None:
    abandoned, written = cache.directory / "a.part", cache.directory / "b.part"
    abandoned.touch()
    written.touch()
    os.utime(abandoned, (1, 1))
    keep(cache, "one")
    assert not abandoned.exists()
    assert written.exists()


def test_the_key_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((8).to_bytes(8, "little") + b"{      }weights")
    keys = [packing_key([path], {"level": level}) for level in ("avx2", "avx2", "avx512")]
    os.utime(path, (5, 5))
    keys.append(packing_key([path], {"level": "avx2"}))
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    keys.append(packing_key([path], {"level": "avx2"}))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_second_load_reads_no_matrix_and_computes_the_same(
    checkpoint: Callable[..., Path],
    cache: PackingCache,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
) -> None:
    made: list[PackedMatmul] = []
    build = PackedMatmul.__init__

    def noting(self: PackedMatmul, *given: object) -> None:
        build(self, *given)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(PackedMatmul, "__init__", noting)
    builder = checkpoint_builder(open_checkpoint(checkpoint("qwen3-moe")))
    place = BuildContext(torch.bfloat16, torch.device("cpu"), 64, quantization=quantization, cache=cache)
    builder.build(place)
    first, made[:] = list(made), []
    monkeypatch.setattr(WeightLoader, "tiles", None)
    builder.build(place)
    assert len(first) == len(made) > 4
    for one, other in zip(first, made, strict=True):
        x = torch.randn(3, one.form.inputs).bfloat16()
        assert torch.equal(one(x), other(x))


def test_the_command_lists_verifies_and_clears(cache: PackingCache, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(cache.directory)
    keep(cache, "one")
    assert app(["cache", directory, "--verify"]) == 0
    assert "the model one" in capsys.readouterr().out
    with only_file(cache).open("r+b") as file:
        file.seek(-3000, os.SEEK_END)
        file.write(b"?")
    assert app(["cache", directory]) == 0
    assert app(["cache", directory, "--verify"]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert app(["cache", directory, "--clear"]) == 0
    assert cache.entries() == []


def test_without_kernels_a_cache_is_said_to_have_no_effect(
    checkpoint: Callable[..., Path],
    cache: PackingCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(library, "supports", lambda *_: False)
    caplog.set_level(logging.INFO)
    builder = checkpoint_builder(open_checkpoint(checkpoint("llama")))
    builder.build(BuildContext(torch.float32, torch.device("cpu"), 64, cache=cache))
    assert "cache_dir keeps no weights" in caplog.text
    assert cache.entries() == []
