"""What the first request of a sequence gets of a state: `initial_state` in a config's `sequence_batching`.

model-config.md section 4.4. Makes the tensors; who is fed them when, the model decides.
"""

from pathlib import Path

from ..core.errors import InvalidArgument
from ..core.tensor import Tensor
from .document import Config, datatype_of
from .labels import inside
from .sample_data import from_file, zeros

_FIELD = "sequence_batching.state.initial_state"


def read_initial_states(config: Config, directory: Path) -> dict[str, Tensor]:
    """By the state's input, without a batch dimension; files are those of `initial_state/` in the model's directory.

    Raises:
        InvalidArgument: one does not fit its state, or its file not itself.
    """
    given = {state.input_name: state for state in config.sequence_batching.state if state.initial_state}
    return {name: _initial(config, state, directory) for name, state in given.items()}


def _initial(config: Config, state: Config, directory: Path) -> Tensor:
    of = f"initial_state of state '{state.input_name}' of model '{config.name}'"
    if len(state.initial_state) > 1:
        raise InvalidArgument(f"{of} is there more than once", field=_FIELD)
    [given] = state.initial_state
    _check(state, given, of)
    datatype, shape = datatype_of(given), tuple(given.dims)
    match given.WhichOneof("state_data"):
        case "zero_data":
            data = zeros(datatype, shape)
        case "data_file":
            data = from_file(datatype, shape, inside(directory, f"initial_state/{given.data_file}"), of)
        case _:
            raise InvalidArgument(f"{of} must have one of zero_data and data_file", field=_FIELD)
    return Tensor(state.input_name, datatype, shape, data)


def _check(state: Config, given: Config, of: str) -> None:
    if given.data_type != state.data_type:
        message = f"{of} is of {datatype_of(given)}, the state of {datatype_of(state)}"
        raise InvalidArgument(message, field=f"{_FIELD}.data_type")
    if any(dim < 0 for dim in given.dims):
        raise InvalidArgument(f"{of} must have dims of at least 0, got {list(given.dims)}", field=f"{_FIELD}.dims")
    fits = len(given.dims) == len(state.dims) and all(
        dim in (-1, size) for dim, size in zip(state.dims, given.dims, strict=True)
    )
    if not fits:
        message = f"{of} has dims {list(given.dims)}, the state {list(state.dims)}"
        raise InvalidArgument(message, field=f"{_FIELD}.dims")
