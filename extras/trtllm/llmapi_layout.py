"""The one model of Triton's newer TensorRT-LLM backend, `llmapi`, behind v2's infer: texts in, texts out.

Names and defaults: https://github.com/triton-inference-server/tensorrtllm_backend/blob/main/docs/llmapi.md.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from ...core.errors import InvalidArgument
from ...core.gateway import ResponseStream
from ...core.request import InferRequest, InferResponse
from ...core.request_context import RequestContext
from ...core.tensor import TensorSpec
from ...engine.client.infer import OUTPUT_VALUES, GeneratingModel, OutputTensor, TensorLayout
from .cancellation import cancel_request, wants_cancellation
from .token_layout import NOT_DECOUPLED

_PREFIX = "sampling_param_"
_CHOOSING = {_PREFIX + name for name in ("temperature", "top_k", "top_p")}
_SAMPLING = {
    "INT32": ("best_of", "top_k", "max_tokens"),
    "FP32": ("temperature", "top_p", "frequency_penalty", "presence_penalty"),
    "UINT64": ("seed",),
    "BOOL": ("exclude_input_from_output", "return_perf_metrics"),
    "BYTES": ("logits_post_processor_name",),
}


def _optional(datatype: str, names: Sequence[str], dims: tuple[int, ...] = (1,)) -> list[TensorSpec]:
    return [TensorSpec(name, datatype, dims, optional=True) for name in names]


INPUTS = (
    TensorSpec("text_input", "BYTES", (-1,)),
    *_optional("BYTES", ("image_url", _PREFIX + "stop"), (-1,)),
    *_optional("BOOL", ("streaming", "stop")),
    *(spec for kind, names in _SAMPLING.items() for spec in _optional(kind, [_PREFIX + name for name in names])),
    *_optional("BOOL", ("return_finish_reason", "return_stop_reason", "return_cumulative_logprob")),
    *_optional("UINT64", ("lora_id",)),
    *_optional("BYTES", ("lora_name", "lora_path", "lora_ckpt_source")),
)

OUTPUTS = (
    *(TensorSpec(name, "BYTES", (-1,)) for name in ("text_output", "finish_reason", "stop_reason")),
    TensorSpec("cumulative_logprob", "FP32", (-1,)),
)

_TENSORS = TensorLayout(
    INPUTS,
    tuple(OutputTensor(spec, OUTPUT_VALUES[spec.name]) for spec in OUTPUTS),
    defaults={"max_tokens": 32},
    implied_stream=False,
)
_GREEDY = replace(_TENSORS, defaults={**_TENSORS.defaults, "temperature": 0.0})


@dataclass(frozen=True, slots=True)
class LlmapiLayout:
    """The tensors of one such model. Without temperature, top_k and top_p a text is greedy."""

    decoupled: bool = False
    inputs: tuple[TensorSpec, ...] = INPUTS
    output_specs: tuple[TensorSpec, ...] = OUTPUTS
    max_batch_size: int = field(default=0, init=False)
    implied_stream: bool = field(default=False, init=False)

    def infer(
        self, request: InferRequest, context: RequestContext, model: GeneratingModel
    ) -> ResponseStream[InferResponse]:
        if wants_cancellation(request):
            return _only(cancel_request(request, model))
        streams = request.inputs.get("streaming")
        if not self.decoupled and streams is not None and streams.data.any():
            raise InvalidArgument(NOT_DECOUPLED, field="streaming")
        tensors = _TENSORS if request.inputs.keys() & _CHOOSING else _GREEDY
        return tensors.infer(request, context, model)


async def _only(response: InferResponse) -> AsyncGenerator[InferResponse, None]:
    yield response
