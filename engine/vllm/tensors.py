"""The tensors of a model of Triton's vLLM backend.

https://github.com/triton-inference-server/vllm_backend. Sampling parameters that a request leaves out have vLLM's
defaults, not the checkpoint's.
"""

from ...core.tensor import TensorSpec
from ..frontend.infer import OUTPUT_VALUES, OutputTensor, TensorLayout

_RETURNED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")

VLLM_LAYOUT = TensorLayout(
    inputs=(
        TensorSpec("text_input", "BYTES", (1,)),
        TensorSpec("image", "BYTES", (-1,), optional=True),
        TensorSpec("stream", "BOOL", (1,), optional=True),
        TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
        TensorSpec("exclude_input_in_output", "BOOL", (1,), optional=True),
        *(TensorSpec(f"return_{name}", "BOOL", (1,), optional=True) for name in _RETURNED),
        TensorSpec("embedding_request", "BYTES", (1,), optional=True),
    ),
    outputs=(
        OutputTensor(TensorSpec("text_output", "BYTES", (-1,)), OUTPUT_VALUES["text_output"]),
        OutputTensor(
            TensorSpec("finish_reason", "BYTES", (-1,)),
            lambda chunks, _: [str(chunk.finish_reason).encode() for chunk in chunks],
        ),
        OutputTensor(TensorSpec("cumulative_logprob", "FP32", (-1,)), OUTPUT_VALUES["cumulative_logprob"]),
        OutputTensor(TensorSpec("logprobs", "BYTES", (-1,)), OUTPUT_VALUES["logprobs"]),
        OutputTensor(TensorSpec("num_input_tokens", "UINT32", (1,)), OUTPUT_VALUES["num_input_tokens"]),
        OutputTensor(TensorSpec("num_output_tokens", "UINT32", (-1,)), OUTPUT_VALUES["num_output_tokens"]),
    ),
    defaults={"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    refused={"lora_name": "LoRA feature is not enabled."},
    echoes=True,
    implied_stream=False,
)
"""A response that is not the last of a stream has the finish reason "None", as vLLM's backend says it."""
