"""Requests that a model answers before anybody else's: the samples of a config's `model_warmup`.

model-config.md section 7. Makes the requests; who runs them on which instance, the model decides.
"""

from pathlib import Path

from ..core.errors import InvalidArgument
from ..core.request import InferRequest
from .document import Config
from .sample_data import Sample


def read_warmup(config: Config, directory: Path) -> tuple[InferRequest, ...]:
    """The samples, each as often as it counts, with data from `warmup/` in the model's directory.

    Raises:
        InvalidArgument: a sample does not fit the model, or its file not the sample.
    """
    samples = ((_sample(config, sample, directory), max(sample.count, 1)) for sample in config.model_warmup)
    return tuple(request for request, count in samples for _ in range(count))


def _sample(config: Config, sample: Config, directory: Path) -> InferRequest:
    of, where = f"warm-up sample '{sample.name}' of model '{config.name}'", f"model_warmup.{sample.name}"
    if sample.batch_size > max(config.max_batch_size, 1):
        message = f"{of} has batch_size {sample.batch_size}, more than max_batch_size {config.max_batch_size}"
        raise InvalidArgument(message, field=where)
    batch = (max(sample.batch_size, 1),) if config.max_batch_size > 0 else ()
    inputs = {
        name: Sample(given, f"input '{name}' of {of}", f"{where}.inputs.{name}")
        for name, given in sorted(sample.inputs.items())
    }
    tensors = {name: given.tensor(name, batch, directory / "warmup") for name, given in inputs.items()}
    return InferRequest(sample.name, tensors)
