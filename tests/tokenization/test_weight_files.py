"""Indexes of weights, before anything opens the files that they name."""

import json
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.tokenization.weight_files import read_weight_index


def test_an_index_says_where_each_tensor_lies(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}))
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    assert read_weight_index(path) == {"a": one, "b": two, "c": one}


def test_an_index_may_be_larger_than_the_largest_published(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    index = json.dumps({"metadata": {"total_size": 5}, "weight_map": {"a": "1.safetensors"}})
    path.write_bytes(index.encode().ljust((1 << 26) + 1))
    assert read_weight_index(path) == {"a": tmp_path / "1.safetensors"}


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_what_is_no_index_is_told(tmp_path: Path, index: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(InvalidArgument, match="not an index of weights"):
        read_weight_index(path)


@pytest.mark.parametrize(
    ("tensors", "words"), [(369_000, "is not JSON"), ((1 << 20) + 1, "it names more than 1048576 tensors")]
)
def test_the_largest_published_mixture_has_room_and_no_more_is_parsed(tmp_path: Path, tensors: int, words: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(b":" * tensors)
    with pytest.raises(InvalidArgument, match=words):
        read_weight_index(path)
