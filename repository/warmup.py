"""Requests that a model answers before anybody else's: the samples of a config's `model_warmup`.

model-config.md section 7. Makes the requests; who runs them on which instance, the model decides.
"""

from collections.abc import Iterable
from pathlib import Path

from ..core.errors import InvalidArgument, request_id_prefix
from ..core.model import ModelConfig, WarmupRequest
from ..core.request import InferRequest
from .config_io import ConfigMessage
from .request_validation import validate_request
from .sample_tensors import SampleTensor


def read_warmup_requests(config: ConfigMessage, directory: Path) -> tuple[WarmupRequest, ...]:
    """The samples, with data from `warmup/` in the model's directory.

    Raises:
        InvalidArgument: a sample does not fit the model, or its file not the sample.
    """
    return tuple(
        WarmupRequest(_warmup_request(config, each, directory), max(each.count, 1)) for each in config.model_warmup
    )


def validate_warmup_requests(config: ModelConfig, samples: Iterable[WarmupRequest]) -> None:
    """Raises `InvalidArgument` for one that no client could ask. Those of a stateful model have controls and states
    among their inputs, if they like."""
    if "sequence_batching" in config.document:
        return
    for sample, _ in samples:
        try:
            validate_request(config, sample)
        except InvalidArgument as error:
            said = f"warm-up sample '{sample.id}': {error.message.removeprefix(request_id_prefix(sample.id))}"
            raise InvalidArgument(said, field=f"model_warmup.{sample.id}") from None


def _warmup_request(config: ConfigMessage, sample: ConfigMessage, directory: Path) -> InferRequest:
    of, where = f"warm-up sample '{sample.name}' of model '{config.name}'", f"model_warmup.{sample.name}"
    if sample.batch_size > max(config.max_batch_size, 1):
        message = f"{of} has batch_size {sample.batch_size}, more than max_batch_size {config.max_batch_size}"
        raise InvalidArgument(message, field=where)
    batch = (max(sample.batch_size, 1),) if config.max_batch_size > 0 else ()
    inputs = {
        name: SampleTensor(given, f"input '{name}' of {of}", f"{where}.inputs.{name}")
        for name, given in sorted(sample.inputs.items())
    }
    tensors = {name: given.tensor(name, batch, directory / "warmup") for name, given in inputs.items()}
    return InferRequest(sample.name, tensors)
