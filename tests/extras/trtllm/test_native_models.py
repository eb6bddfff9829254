"""Which backend serves a model of Triton's TensorRT-LLM repositories that asks for the Python backend."""

from pathlib import Path

import pytest

from charonia.repository.model_source import read_model

PREPROCESSING = ("QUERY", "REQUEST_OUTPUT_LEN"), ("tokenizer_dir",)
POSTPROCESSING = ("TOKENS_BATCH", "SEQUENCE_LENGTH"), ("tokenizer_dir",)
BLS = ("text_input", "max_tokens"), ("accumulate_tokens",)
LLM = ("input_ids", "input_lengths", "request_output_len"), ("gpt_model_path",)
LLMAPI = ("text_input", "sampling_param_max_tokens"), ()
OTHER = ("text_input",), ("tokenizer_dir",)


@pytest.mark.parametrize(
    ("model", "files", "backend"),
    [
        (PREPROCESSING, (), "charonia_preprocessing"),
        (POSTPROCESSING, (), "charonia_postprocessing"),
        (BLS, (), "charonia_bls"),
        *((model, ("model.py",), "python") for model in (PREPROCESSING, POSTPROCESSING, BLS)),
        (LLM, ("model.py",), "tensorrtllm"),
        (LLMAPI, ("model.py", "model.yaml"), "llmapi"),
        (LLMAPI, ("model.py",), "python"),
        (OTHER, ("model.py", "model.yaml"), "python"),
        (OTHER, (), "python"),
    ],
)
def test_code_in_the_folder_is_run_but_for_the_model_that_computes(
    tmp_path: Path, model: tuple[tuple[str, ...], tuple[str, ...]], files: tuple[str, ...], backend: str
) -> None:
    inputs, parameters = model
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    for name in files:
        (directory / "1" / name).write_text("")
    said = [f'input {{ name: "{name}" data_type: TYPE_INT32 dims: [ 1 ] }}' for name in inputs]
    said += [f'parameters {{ key: "{name}" value {{ string_value: "${{x}}" }} }}' for name in parameters]
    (directory / "config.pbtxt").write_text("\n".join(['backend: "python"', *said]))
    source = read_model(directory)
    assert source.backend == backend
    assert source.config["default_model_filename"] == ("model.py" if backend == "python" else "")
