"""What a door that answers once takes of a model, and of its stream."""

from ..core.gateway import ResponseStream
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse

_STREAM = "stream"
_TRUE = (True, "true", "True", "TRUE", "1")


async def read_up_to_two(responses: ResponseStream[InferResponse]) -> list[InferResponse]:
    """Enough of the stream to know whether it holds exactly one; the caller closes it. An empty end is none."""
    answers: list[InferResponse] = []
    async for response in responses:
        if not is_empty_final(response):
            answers.append(response)
        if response.final or len(answers) == 2:
            break
    return answers


def is_empty_final(response: InferResponse) -> bool:
    """A response that only says that there are no more."""
    return response.final and not response.outputs


def supports_single_response(config: ModelConfig) -> bool:
    """A decoupled model does if it can be asked to."""
    return not config.decoupled or any(spec.name == _STREAM and spec.datatype == "BOOL" for spec in config.inputs)


def wants_stream(asked: InferRequest) -> bool:
    """Of a model that can be asked for either."""
    if _STREAM in asked.inputs:
        return bool(asked.inputs[_STREAM].data.any())
    return asked.parameters.get(_STREAM, asked.parameters.get("streaming", False)) in _TRUE
