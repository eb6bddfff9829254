"""The samples of a config's warm-up, and the config that a language model shows."""

from pathlib import Path

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.tensor import Tensor, TensorSpec
from charonia.repository.builder import with_config_defaults
from charonia.repository.config_io import parse_config_text as config_of
from charonia.repository.model_files import read_warmup_requests


def one_input(root: Path, datatype: str, data: str, batch: str = "max_batch_size: 4", size: int = 2) -> Tensor:
    value = f'inputs {{ key: "A" value {{ data_type: TYPE_{datatype} dims: [ 3 ] {data} }} }}'
    sample = f'name: "m" {batch} model_warmup {{ name: "w" batch_size: {size} {value} }}'
    [(request, times)] = read_warmup_requests(config_of(sample), root)
    assert (request.id, times) == ("w", 1)
    return request.inputs["A"]


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP32", "FP64", "BF16", "STRING"])
@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true"])
def test_made_data(tmp_path: Path, datatype: str, data: str) -> None:
    tensor = one_input(tmp_path, datatype, data)
    assert (tensor.shape, tensor.data.shape) == ((2, 3), (2, 3))
    if datatype == "STRING":
        assert (tensor.datatype, {*tensor.data.ravel()}) == ("BYTES", {b""})
    elif data.startswith("zero"):
        assert not tensor.data.any()
    else:
        assert tensor.data.any()
        assert datatype == "BF16" or tensor.data.max() < 100


def test_data_from_files(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    numbers = np.arange(3, dtype=np.float32)
    (tmp_path / "warmup" / "x").write_bytes(numbers.tobytes())
    tensor = one_input(tmp_path, "FP32", 'input_data_file: "x"', "", size=0)
    assert (tensor.shape, tensor.data.tolist()) == ((3,), [0, 1, 2])
    (tmp_path / "warmup" / "x").write_bytes(b"\1\0\0\0a\0\0\0\0\2\0\0\0bc")
    tensor = one_input(tmp_path, "STRING", 'input_data_file: "x"', "", size=1)
    assert tensor.data.tolist() == [b"a", b"", b"bc"]


@pytest.mark.parametrize("items", [1, 2])
def test_a_file_holds_one_item_for_all_of_a_batch_or_the_batch(tmp_path: Path, items: int) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x").write_bytes(np.arange(3 * items, dtype=np.float32).tobytes())
    tensor = one_input(tmp_path, "FP32", 'input_data_file: "x"')
    assert (tensor.shape, tensor.data.tolist()) == ((2, 3), [[0, 1, 2], [0, 1, 2] if items == 1 else [3, 4, 5]])
    (tmp_path / "warmup" / "x").write_bytes(b"\1\0\0\0a\0\0\0\0\2\0\0\0bc" * items)
    tensor = one_input(tmp_path, "STRING", 'input_data_file: "x"')
    assert tensor.data.tolist() == [[b"a", b"", b"bc"]] * 2


@pytest.mark.parametrize(
    ("datatype", "content", "says"),
    [
        ("FP32", b"12", "x has 2 bytes, not 12"),
        ("STRING", b"\1\0\0\0", "does not hold 3 strings, each after its length"),
        ("STRING", b"\xff\xff\xff\xff", "does not hold 3 strings"),
        ("FP32", None, "cannot read"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, datatype: str, content: bytes | None, says: str) -> None:
    (tmp_path / "warmup").mkdir()
    if content is not None:
        (tmp_path / "warmup" / "x").write_bytes(content)
    with pytest.raises(InvalidArgument, match="input 'A' of warm-up sample 'w' of model 'm'") as caught:
        one_input(tmp_path, datatype, 'input_data_file: "x"', "", size=1)
    assert says in caught.value.message
    with pytest.raises(InvalidArgument, match="must stay within the model directory"):
        one_input(tmp_path, datatype, 'input_data_file: "../../x"', "", size=1)


def test_a_language_model_shows_what_it_is() -> None:
    written = config_of(
        """name: "llm" backend: "charonia" max_batch_size: 8 metric_tags { key: "a" value: "b" }
        input { name: "own" data_type: TYPE_FP32 dims: 1 } parameters { key: "ahead" value { string_value: "1" } }"""
    )
    inputs = (TensorSpec("text_input", "BYTES", (1,), optional=True), TensorSpec("input_ids", "INT32", (-1,)))
    own = ModelConfig("llm", "2", "charonia", decoupled=True, inputs=inputs)
    raw = with_config_defaults(own, written).raw
    shown = [(side["name"], side["data_type"], side["dims"], side["optional"]) for side in raw["input"]]
    assert shown == [("text_input", "TYPE_STRING", [1], True), ("input_ids", "TYPE_INT32", [-1], False)]
    assert (raw["max_batch_size"], raw["output"]) == (0, [])
    assert raw["model_transaction_policy"] == {"decoupled": True}
    assert raw["instance_group"][0]["kind"] == "KIND_MODEL"
    assert raw["parameters"] == {"ahead": {"string_value": "1"}}
    assert raw["metric_tags"] == {"a": "b"}
    assert raw["version_policy"] == {"latest": {"num_versions": 1}}


@pytest.mark.parametrize("dims", [[2**40], [2**31], [1] * 65])
def test_what_a_few_digits_make_too_large_is_refused(tmp_path: Path, dims: list[int]) -> None:
    value = f'inputs {{ key: "A" value {{ data_type: TYPE_INT8 dims: {dims} zero_data: true }} }}'
    with pytest.raises(InvalidArgument, match="at most 64 dimensions and 2147483647 bytes"):
        read_warmup_requests(config_of(f'name: "m" model_warmup {{ name: "w" {value} }}'), tmp_path)


def test_a_sample_that_counts_without_end_is_made_once(tmp_path: Path) -> None:
    [sample] = read_warmup_requests(config_of(f'name: "m" model_warmup {{ name: "w" count: {2**32 - 1} }}'), tmp_path)
    assert sample.times == 2**32 - 1
