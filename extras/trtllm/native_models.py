"""Which backend serves a model of Triton's TensorRT-LLM repositories that asks for the Python backend.

The model that computes is served so in any case, for its Python code only hands requests to TensorRT-LLM; the others
where their code is not in the folder.
"""

from pathlib import Path

from ...core.model import RawConfig
from ...core.regular_files import MAX_TEXT_BYTES, read_regular

_LLMAPI_INPUTS = "sampling_param_"


def find_native_backend(raw: RawConfig, directory: Path) -> str | None:
    """See `core.backends.NativeBackendFinder`."""
    inputs = {tensor["name"] for tensor in raw["input"]}
    parameters = raw["parameters"].keys()
    if _is_llmapi(inputs, directory / "model.yaml"):
        return "llmapi"
    if {"input_ids", "request_output_len"} <= inputs and "gpt_model_path" in parameters:
        return "tensorrtllm"
    if (directory / (raw["default_model_filename"] or "model.py")).exists():
        return None
    if {"QUERY", "REQUEST_OUTPUT_LEN"} <= inputs:
        return "charonia_preprocessing"
    if {"TOKENS_BATCH", "SEQUENCE_LENGTH"} <= inputs:
        return "charonia_postprocessing"
    if "text_input" in inputs and {"accumulate_tokens", "tensorrt_llm_model_name"} & parameters:
        return "charonia_bls"
    return None


def _is_llmapi(inputs: set[str], file: Path) -> bool:
    if not file.is_file():
        return False
    return any(name.startswith(_LLMAPI_INPUTS) for name in inputs) or b"triton_config" in read_regular(
        file, MAX_TEXT_BYTES
    )
