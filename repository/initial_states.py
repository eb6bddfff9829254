"""What the first request of a sequence gets of a state: `initial_state` in a config's `sequence_batching`.

model-config.md section 4.4. Makes the tensors; who is fed them when, the model decides.
"""

from pathlib import Path

from ..core.errors import InvalidArgument
from ..core.tensor import Tensor
from .config_io import ConfigMessage, v2_datatype
from .sample_tensors import SampleTensor

_FIELD = "sequence_batching.state.initial_state"


def read_initial_states(config: ConfigMessage, directory: Path) -> dict[str, Tensor]:
    """By the state's input, without a batch dimension; files are those of `initial_state/` in the model's directory.

    Raises:
        InvalidArgument: one does not fit its state, or its file not itself.
    """
    given = {state.input_name: state for state in config.sequence_batching.state if state.initial_state}
    return {name: _initial_state(config, state, directory) for name, state in given.items()}


def _initial_state(config: ConfigMessage, state: ConfigMessage, directory: Path) -> Tensor:
    of = f"initial_state of state '{state.input_name}' of model '{config.name}'"
    if len(state.initial_state) > 1:
        raise InvalidArgument(f"{of} is there more than once", field=_FIELD)
    [given] = state.initial_state
    _check(state, given, of)
    return SampleTensor(given, of, _FIELD).tensor(state.input_name, (), directory / "initial_state")


def _check(state: ConfigMessage, given: ConfigMessage, of: str) -> None:
    if given.data_type != state.data_type:
        message = f"{of} is of {v2_datatype(given)}, the state of {v2_datatype(state)}"
        raise InvalidArgument(message, field=f"{_FIELD}.data_type")
    fits = len(given.dims) == len(state.dims) and all(
        dim in (-1, size) for dim, size in zip(state.dims, given.dims, strict=True)
    )
    if not fits:
        message = f"{of} has dims {list(given.dims)}, the state {list(state.dims)}"
        raise InvalidArgument(message, field=f"{_FIELD}.dims")
