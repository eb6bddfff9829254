"""Which reader a checkpoint's weights have."""

from .gguf_weights import GgufWeights
from .hf_checkpoint import Checkpoint, text_tensor_name
from .weights import CheckpointWeights, WeightSource


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The weights of `checkpoint`, by the names that our architectures give them.

    Raises:
        CheckpointError: no weights, a missing or truncated file.
    """
    if checkpoint.gguf is not None:
        return GgufWeights(checkpoint.gguf, checkpoint.spec.head_dim)
    return CheckpointWeights(checkpoint.directory, text_tensor_name if checkpoint.language_part else str)
