"""Requests that a model answers before anybody else's: the samples of a config's `model_warmup`.

model-config.md section 7. Makes the requests; who runs them on which instance, the model decides.
"""

from pathlib import Path

from ..core.errors import InvalidArgument
from ..core.request import InferRequest
from ..core.tensor import Tensor
from .document import Config, datatype_of
from .labels import inside
from .sample_data import from_file, random, zeros


def read_warmup(config: Config, directory: Path) -> tuple[InferRequest, ...]:
    """The samples, each as often as it counts, with data from `warmup/` in the model's directory.

    Raises:
        InvalidArgument: a sample does not fit the model, or its file not the sample.
    """
    samples = ((_sample(config, sample, directory), max(sample.count, 1)) for sample in config.model_warmup)
    return tuple(request for request, count in samples for _ in range(count))


def _sample(config: Config, sample: Config, directory: Path) -> InferRequest:
    where = f"model_warmup.{sample.name}"
    if sample.batch_size > max(config.max_batch_size, 1):
        message = f"warm-up sample '{sample.name}' of model '{config.name}' has batch_size {sample.batch_size}"
        raise InvalidArgument(f"{message}, more than max_batch_size {config.max_batch_size}", field=where)
    batch = (max(sample.batch_size, 1),) if config.max_batch_size > 0 else ()
    tensors = {name: _tensor(config, sample, name, batch, directory) for name in sorted(sample.inputs)}
    return InferRequest(sample.name, tensors)


def _tensor(config: Config, sample: Config, name: str, batch: tuple[int, ...], directory: Path) -> Tensor:
    given, where = sample.inputs[name], f"model_warmup.{sample.name}.inputs.{name}"
    of = f"input '{name}' of warm-up sample '{sample.name}' of model '{config.name}'"
    if any(dim < 0 for dim in given.dims):
        raise InvalidArgument(f"{of} must have dims of at least 0, got {list(given.dims)}", field=where)
    if given.data_type == 0:
        raise InvalidArgument(f"{of} must specify 'data_type'", field=where)
    datatype = datatype_of(given)
    shape = (*batch, *given.dims)
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            data = zeros(datatype, shape)
        case "random_data":
            data = random(datatype, shape)
        case "input_data_file":
            data = from_file(datatype, shape, inside(directory, f"warmup/{given.input_data_file}"), of)
        case _:
            raise InvalidArgument(f"{of} must have one of zero_data, random_data and input_data_file", field=where)
    return Tensor(name, datatype, shape, data)
