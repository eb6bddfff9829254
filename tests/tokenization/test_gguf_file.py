"""GGUF files as the public package writes them, and as somebody spoilt them."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import InvalidArgument, NotFound
from charonia.tokenization.gguf_file import read_gguf


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "", "東京"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_tensor("matrix", np.arange(96, dtype=np.float32).reshape(3, 32))
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def changed(written: Path, tmp_path: Path) -> Callable[[bytes, bytes], Path]:
    """The same file with some of its bytes replaced."""

    def change(old: bytes, new: bytes) -> Path:
        content, path = written.read_bytes(), tmp_path / "changed.gguf"
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        return path

    return change


def test_metadata_and_tensors_are_what_was_written(written: Path) -> None:
    file = read_gguf(written)
    assert file.text("general.architecture") == "llama"
    assert file.number("llama.block_count") == 3
    assert file.real("llama.rope.freq_base") == 0.5
    assert file.flag("tokenizer.ggml.add_bos_token")
    assert file.strings("tokenizer.ggml.tokens") == ["a", "ü", "", "東京"]
    assert file.numbers("tokenizer.ggml.scores").tolist() == [0.5, -1.0]
    matrix, blocks = file.tensors["matrix"], file.tensors["blocks"]
    assert (matrix.shape, matrix.type.name, blocks.shape, blocks.type.name) == ((3, 32), "F32", (2, 64), "Q4_0")
    content = written.read_bytes()
    assert np.frombuffer(content, "<f4", 96, matrix.offset).tolist() == list(range(96))
    assert blocks.offset + blocks.bytes <= len(content)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda file: file.number("llama.context_length"), "no llama.context_length"),
        (lambda file: file.number("general.architecture"), "general.architecture must be a whole number, got 'llama'"),
        (lambda file: file.number("tokenizer.ggml.add_bos_token"), "must be a whole number, got True"),
        (lambda file: file.text("tokenizer.ggml.tokens"), "must be text, got an array"),
    ],
)
def test_a_value_that_is_missing_or_of_another_kind_is_named(
    written: Path, ask: Callable[[object], object], told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        ask(read_gguf(written))


HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "of version 1"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "big-endian"),
        (b"GGUF\x03\0\0\0", b"GGML\x03\0\0\0", "does not begin with GGUF"),
        (struct.pack("<QQ", 2, 6), HUGE + struct.pack("<Q", 6), "truncated"),
        (struct.pack("<QQ", 2, 6), struct.pack("<Q", 2) + HUGE, "truncated"),
        (struct.pack("<IIQ", 9, 8, 4), struct.pack("<II", 9, 8) + HUGE, "truncated"),
        (struct.pack("<IIQ", 9, 8, 4), struct.pack("<IIQ", 9, 9, 4), "array of kind 9"),
        (struct.pack("<IIQ", 9, 8, 4), struct.pack("<IIQ", 13, 8, 4), "a value of kind 13"),
        (b"llama.rope.freq_base", b"general.architecture", "general.architecture twice"),
        (b"llama.rope.freq_base", b"\xff" * 20, "not UTF-8"),
        (struct.pack("<QQI", 64, 2, 2), struct.pack("<QQI", 64, 2, 10), "type Q2_K .10., which is not supported"),
        (struct.pack("<QQI", 64, 2, 2), struct.pack("<QQI", 64, 2, 99), "type unknown .99."),
        (struct.pack("<QQI", 64, 2, 2), struct.pack("<QQI", 63, 2, 2), r"can't have shape \[2, 63\]"),
        (struct.pack("<QQI", 64, 2, 2), struct.pack("<QQI", 64, 0, 2), r"can't have shape \[0, 64\]"),
        (struct.pack("<QQI", 64, 2, 2), struct.pack("<Q", 64) + HUGE + struct.pack("<I", 2), "can't have shape"),
        (struct.pack("<QQI", 64, 2, 2), struct.pack("<QQI", 64, 99, 2), "truncated: tensor blocks ends"),
        (struct.pack("<I", 2) + struct.pack("<QQI", 64, 2, 2), struct.pack("<IQQI", 9, 64, 2, 2), "9 dimensions"),
        (struct.pack("<QQIQ", 64, 2, 2, 384), struct.pack("<QQIQ", 64, 2, 2, 352), "blocks overlaps"),
        (struct.pack("<QQIQ", 64, 2, 2, 384), struct.pack("<QQIQ", 64, 2, 2, 385), "begins at 385"),
    ],
)
def test_a_file_that_lies_is_refused_with_what_is_wrong(
    changed: Callable[[bytes, bytes], Path], old: bytes, new: bytes, told: str
) -> None:
    path = changed(old, new)
    with pytest.raises(InvalidArgument, match=told) as error:
        read_gguf(path)
    assert str(path) in error.value.message


def test_a_file_that_ends_early_is_refused_wherever_it_does(written: Path, tmp_path: Path) -> None:
    content, path = written.read_bytes(), tmp_path / "short.gguf"
    needed = max(tensor.offset + tensor.bytes for tensor in read_gguf(written).tensors.values())
    for end in [*range(13, needed, 13), needed - 1]:
        path.write_bytes(content[:end])
        with pytest.raises(InvalidArgument, match="truncated"):
            read_gguf(path)


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    (path := tmp_path / "empty.gguf").touch()
    with pytest.raises(InvalidArgument, match="no GGUF file: it is empty"):
        read_gguf(path)


@settings(max_examples=150)
@given(st.data())
def test_spoilt_files_are_read_or_refused_and_nothing_else(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content, path = bytearray(written.read_bytes()), tmp_path_factory.getbasetemp() / "spoilt.gguf"
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 9))
        spoilt = data.draw(st.sampled_from([b"\xff", b"\0", b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 31)]))
        content[at : at + len(spoilt)] = spoilt
    path.write_bytes(content)
    try:
        tensors = read_gguf(path).tensors
    except InvalidArgument:
        tensors = {}
    assert all(tensor.offset + tensor.bytes <= len(content) for tensor in tensors.values())


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    for name, content in (
        ("empty", b""),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\n"),
        ("text", b"hello" * 9),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=name):
            read_gguf(path)
    with pytest.raises(NotFound, match="missing"):
        read_gguf(tmp_path / "nowhere.gguf")


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=1)
    for name in ("first", "second", "third"):
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("big-*.gguf"))


def test_shards_are_one_model_whichever_is_named(shards: list[Path]) -> None:
    found = [read_gguf(shard) for shard in shards]
    assert len(shards) == 3
    assert {each.path for each in found} == {shards[0]}
    assert list(found[2].tensors) == ["first", "second", "third"]
    assert [found[0].tensors[name].file for name in ("first", "second", "third")] == shards


def test_shards_that_are_missing_or_another_model_s_are_refused(shards: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"split.count is 3, but its name means 1"):
        read_gguf(shards[0].rename(tmp_path / "alone.gguf"))
    (tmp_path / "alone.gguf").rename(shards[0])
    second = shards[1].read_bytes()
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(InvalidArgument, match="not part 2 of 3"):
        read_gguf(shards[0])
    shards[1].write_bytes(second)
    shards[2].unlink()
    with pytest.raises(NotFound, match="00003-of-00003"):
        read_gguf(shards[0])
