"""Requests that a model answers before anybody else's: the samples of a config's `model_warmup`.

model-config.md section 7. Makes the requests; who runs them on which instance, the model decides.
"""

from collections.abc import Iterable
from pathlib import Path

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig, WarmUp
from ..core.request import InferRequest
from .config_io import Config
from .request_validation import check
from .sample_tensors import Sample


def read_warmup(config: Config, directory: Path) -> tuple[WarmUp, ...]:
    """The samples, with data from `warmup/` in the model's directory.

    Raises:
        InvalidArgument: a sample does not fit the model, or its file not the sample.
    """
    return tuple(WarmUp(_sample(config, each, directory), max(each.count, 1)) for each in config.model_warmup)


def check_samples(config: ModelConfig, samples: Iterable[WarmUp]) -> None:
    """Raises `InvalidArgument` for one that no client could ask. Those of a stateful model have controls and states
    among their inputs, if they like."""
    if "sequence_batching" in config.document:
        return
    for sample, _ in samples:
        try:
            check(config, sample)
        except InvalidArgument as error:
            said = f"warm-up sample '{sample.id}': {error.message.removeprefix(f'[request id: {sample.id}] ')}"
            raise InvalidArgument(said, field=f"model_warmup.{sample.id}") from None


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
