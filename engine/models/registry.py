"""The architectures we serve."""

from ..spec import CheckpointError
from .base import Builder
from .gemma import gemma2, gemma3
from .llama import llama
from .mistral import mistral
from .mixtral import mixtral
from .phi3 import phi3
from .qwen2 import qwen2
from .qwen3 import qwen3, qwen3_moe

ARCHITECTURES: dict[str, Builder] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}
"""config.json's `architectures` entry -> what builds the model."""


def builder(architecture: str, where: str) -> Builder:
    """Raises CheckpointError: the architecture is not in the table; `where` names the checkpoint."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{where}: architecture {architecture} is not supported; supported: {supported}")
    return ARCHITECTURES[architecture]
