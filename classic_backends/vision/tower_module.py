"""What a tower is to those that ask it, and the weights that it is loaded from. Imported only where one is loaded."""

from collections.abc import Callable
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor, nn

from .vision_files import VisionFiles


class TowerModule(NamedTuple):
    """A loaded module, and how it is asked."""

    module: nn.Module
    main_input: str
    """The processor's name of the input that is in the module's dtype."""
    features: Callable[..., Any]
    """Takes the inputs by the processor's names."""
    output: str
    """The attribute of its result with the rows [media, length, hidden], or a list of such."""


def read_weights(files: VisionFiles) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in {weight.file for weight in files.weights}:
        with safe_open(file, framework="pt") as opened:
            for weight in files.weights:
                if weight.file == file:
                    tensors[weight.name] = opened.get_tensor(weight.name)
    return tensors
