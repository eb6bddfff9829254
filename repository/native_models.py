"""Which of our own backends serves a model of Triton's TensorRT-LLM repositories that asks for the Python backend.

The model that computes does so in any case, for its Python code only hands requests to TensorRT-LLM; the others where
their code is not in the folder.
"""

from pathlib import Path

from ..core.regular_files import MAX_TEXT_BYTES, read_regular
from .config_io import ConfigMessage

PREPROCESSING, POSTPROCESSING = "charonia_preprocessing", "charonia_postprocessing"
BLS = "charonia_bls"
NATIVE_BACKENDS = (PREPROCESSING, POSTPROCESSING, BLS)
"""Those that stand in for Python code."""

_LLMAPI_INPUTS = "sampling_param_"


def native_backend(config: ConfigMessage, directory: Path) -> str | None:
    """The backend; None for a model that is a Python model. `directory`: of the version."""
    inputs, parameters = {tensor.name for tensor in config.input}, set(config.parameters)
    if _is_llmapi(inputs, directory / "model.yaml"):
        return "llmapi"
    if {"input_ids", "request_output_len"} <= inputs and "gpt_model_path" in parameters:
        return "tensorrtllm"
    if (directory / (config.default_model_filename or "model.py")).exists():
        return None
    if {"QUERY", "REQUEST_OUTPUT_LEN"} <= inputs:
        return PREPROCESSING
    if {"TOKENS_BATCH", "SEQUENCE_LENGTH"} <= inputs:
        return POSTPROCESSING
    if "text_input" in inputs and {"accumulate_tokens", "tensorrt_llm_model_name"} & parameters:
        return BLS
    return None


def _is_llmapi(inputs: set[str], file: Path) -> bool:
    if not file.is_file():
        return False
    return any(name.startswith(_LLMAPI_INPUTS) for name in inputs) or b"triton_config" in read_regular(
        file, MAX_TEXT_BYTES
    )
