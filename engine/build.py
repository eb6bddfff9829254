"""What the repository's table of kinds knows of this floor: how to build a language model."""

from collections.abc import Callable, Mapping

from ..core.model import Model
from .llm import LlmModel
from .options import engine_config, parse_options


def language_model(
    name: str,
    version: str,
    path: str,
    parameters: Mapping[str, str],
    on_progress: Callable[[str, float, float, str], None],
) -> Model:
    """A language model over the checkpoint at `path`, which the parameter `model` may replace.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    settings = dict(parameters)
    checkpoint = settings.pop("model", path)
    return LlmModel(name, version, engine_config(checkpoint, parse_options(settings)), on_progress)
