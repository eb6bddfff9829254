"""What sequences begin with, and what a config with sequences shows."""

from pathlib import Path

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument, Unsupported
from charonia.core.tensor import Tensor
from charonia.repository.config_defaults import fill_defaults
from charonia.repository.config_io import parse_config_text as config_of
from charonia.repository.config_validation import ignored_fields, refuse_unsupported_fields
from charonia.repository.model_files import read_initial_states


def initial(root: Path, text: str, of: str = "TYPE_FP32 dims: [ -1, 2 ]") -> Tensor:
    state = f'state {{ input_name: "S" output_name: "T" data_type: {of} {text} }}'
    states = read_initial_states(config_of(f'name: "m" sequence_batching {{ {state} state {{}} }}'), root)
    assert list(states) == ["S"]
    return states["S"]


def test_zeros() -> None:
    tensor = initial(Path(), "initial_state { data_type: TYPE_FP32 dims: [ 3, 2 ] zero_data: true }")
    assert (tensor.datatype, tensor.data.dtype, tensor.data.tolist()) == ("FP32", np.float32, [[0, 0]] * 3)
    texts = initial(Path(), "initial_state { data_type: TYPE_STRING dims: 1 zero_data: true }", "TYPE_STRING dims: 1")
    assert texts.data.tolist() == [b""]


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    numbers = np.arange(4, dtype=np.float32).reshape(2, 2)
    (tmp_path / "initial_state" / "x").write_bytes(numbers.tobytes())
    tensor = initial(tmp_path, 'initial_state { data_type: TYPE_FP32 dims: [ 2, 2 ] data_file: "x" }')
    np.testing.assert_array_equal(tensor.data, numbers)


ZEROS = "initial_state { data_type: TYPE_FP32 dims: [ 1, 2 ] zero_data: true }"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ZEROS.replace("FP32", "INT32"), "is of INT32, the state of FP32"),
        (ZEROS.replace("1, 2", "1, 3"), r"has dims \[1, 3\], the state \[-1, 2\]"),
        (ZEROS.replace("1, 2", "2"), r"has dims \[2\], the state"),
        (ZEROS.replace("1, 2", "-1, 2"), "must have dims of at least 0"),
        (ZEROS.replace("zero_data: true", ""), "must have one of zero_data and data_file"),
        (ZEROS + ZEROS, "is there more than once"),
        (ZEROS.replace("zero_data: true", 'data_file: "y"'), "cannot read .*/initial_state/y"),
        (ZEROS.replace("zero_data: true", 'data_file: "../../y"'), "must stay within the model directory"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){says}") as refused:
        initial(tmp_path, text)
    if "model directory" not in says:
        assert "initial_state of state 'S' of model 'm'" in refused.value.message


def test_defaults_are_shown_as_triton_shows_them() -> None:
    config = config_of("max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 4 } }")
    sequences = fill_defaults(config, ())["sequence_batching"]
    assert sequences["max_sequence_idle_microseconds"] == 1_000_000
    assert sequences["oldest"]["preferred_batch_size"] == [8]
    plain = config_of("max_batch_size: 8 sequence_batching { max_sequence_idle_microseconds: 5 }")
    sequences = fill_defaults(plain, ())["sequence_batching"]
    assert sequences["max_sequence_idle_microseconds"] == 5
    assert sequences.keys().isdisjoint({"direct", "oldest"})


def test_what_has_no_effect_is_named_and_language_models_have_no_sequences() -> None:
    state = 'state { input_name: "S" use_growable_memory: true }'
    classic = config_of(f'name: "m" backend: "onnxruntime" sequence_batching {{ {state} }}')
    refuse_unsupported_fields(classic)
    assert list(ignored_fields(classic)) == ["sequence_batching.state.use_growable_memory"]
    with pytest.raises(Unsupported, match="model 'm' has sequence_batching: language models keep no sequences"):
        refuse_unsupported_fields(config_of('name: "m" backend: "charonia" sequence_batching {}'))
