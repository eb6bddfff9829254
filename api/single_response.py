"""Rules for endpoints that return one response: which models have one, and how it is read from their stream."""

from ..core.gateway import ResponseStream
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse

_STREAM = "stream"
_TRUE = (True, "true", "True", "TRUE", "1")


async def read_up_to_two(responses: ResponseStream[InferResponse]) -> list[InferResponse]:
    """The first response of a stream, and a second where there is one: enough to tell whether it holds exactly one.

    A final response without outputs does not count. The caller closes the stream.
    """
    answers: list[InferResponse] = []
    async for response in responses:
        if not is_empty_final(response):
            answers.append(response)
        if response.final or len(answers) == 2:
            break
    return answers


def is_empty_final(response: InferResponse) -> bool:
    """Whether a response tells nothing but that it is the last."""
    return response.final and not response.outputs


def supports_single_response(config: ModelConfig) -> bool:
    """Whether a model returns one response to a request: always, or, decoupled, when its input `stream` is false."""
    return not config.decoupled or any(spec.name == _STREAM and spec.datatype == "BOOL" for spec in config.inputs)


def wants_stream(asked: InferRequest) -> bool:
    """Whether a request to a decoupled model asks for a stream, by the input or the parameter `stream`."""
    if _STREAM in asked.inputs:
        return bool(asked.inputs[_STREAM].data.any())
    return asked.parameters.get(_STREAM, asked.parameters.get("streaming", False)) in _TRUE
