"""Messages for models that need a package which is not installed."""

from .errors import Unsupported

_LLM_PACKAGES = frozenset({"jinja2", "llguidance", "safetensors", "tokenizers", "torch", "transformers", "zmq"})


def missing_llm_package(error: ModuleNotFoundError) -> Unsupported | None:
    """The refusal of a model that needs a missing package of the extra `llm`; None if the missing package is
    another."""
    package = (error.name or "").partition(".")[0]
    if package not in _LLM_PACKAGES:
        return None
    message = f"this model needs the package {package}, which is not installed: pip install '.[llm]'"
    return Unsupported(message, field="backend")
