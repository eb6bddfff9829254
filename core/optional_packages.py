"""The packages of extras: what is said where a model needs one that is not installed."""

from .errors import Unsupported

_LLM_PACKAGES = frozenset({"jinja2", "llguidance", "safetensors", "tokenizers", "torch", "transformers", "zmq"})


def missing_llm_package(error: ModuleNotFoundError) -> Unsupported | None:
    """The refusal of a model for which `error` was raised where the extra `llm` would have brought the module: language
    models, encoders and PyTorch's. None for another module."""
    package = (error.name or "").partition(".")[0]
    if package not in _LLM_PACKAGES:
        return None
    message = f"this model needs the package {package}, which is not installed: pip install '.[llm]'"
    return Unsupported(message, field="backend")
