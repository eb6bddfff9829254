"""Which reader a checkpoint's weights have."""

import logging

from .gguf_weights import GgufWeights
from .hf_checkpoint import Checkpoint, text_tensor_name
from .quantised_weights import QuantizedWeights
from .quantization_config import read_quantization
from .weights import CheckpointWeights, WeightSource

log = logging.getLogger(__name__)


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The weights of `checkpoint`, by the names that our architectures give them.

    Raises:
        CheckpointError: no weights, a missing or truncated file, or one that is quantised in a way that is not served.
    """
    if checkpoint.gguf is not None:
        return GgufWeights(checkpoint.gguf, checkpoint.spec.head_dim)
    weights = CheckpointWeights(checkpoint.directory, text_tensor_name if checkpoint.language_part else str)
    stored = read_quantization(checkpoint.config, checkpoint.where)
    if stored is None:
        return weights
    for note in stored.notes:
        log.info("%s: %s", checkpoint.directory, note)
    return QuantizedWeights(weights, stored)
