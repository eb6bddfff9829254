"""How to make the engine of a model that TensorRT-LLM runs."""

from collections.abc import Callable

from ...telemetry.llm_metrics import LlmMetrics
from ..client.engine import EngineSpec
from ..core.messages import CoreLoading
from .client import TrtllmClient
from .options import TrtllmOptions
from .runtime import TrtllmRuntimeLoader

BACKEND = "tensorrtllm"


def trtllm_engine_spec(model: str, options: TrtllmOptions) -> EngineSpec:
    """The engine of a model, with the capabilities that its options give it."""
    means = {"adapter": options.adapters, "guided_decoding": options.guided_decoding_backend}
    capabilities = frozenset(name for name, given in means.items() if given)

    def connect(on_progress: Callable[[CoreLoading], None], metrics: LlmMetrics) -> TrtllmClient:
        return TrtllmClient(TrtllmRuntimeLoader(model, options), options, on_progress, metrics)

    template = options.chat_template or ""
    return EngineSpec(
        BACKEND,
        options.tokenizer or model,
        connect,
        capabilities,
        template,
        parsers=options.parsers,
        adapters=options.adapters,
    )
