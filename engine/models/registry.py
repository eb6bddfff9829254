"""The architectures we serve."""

from ..spec import CheckpointError
from .base import Builder
from .llama import llama
from .qwen2 import qwen2

ARCHITECTURES: dict[str, Builder] = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
}
"""config.json's `architectures` entry -> what builds the model."""


def builder(architecture: str, where: str) -> Builder:
    """Raises CheckpointError: the architecture is not in the table; `where` names the checkpoint."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{where}: architecture {architecture} is not supported; supported: {supported}")
    return ARCHITECTURES[architecture]
