"""The input `stop` of the TensorRT-LLM models: a request that cancels those with its id."""

from ...core.errors import InvalidArgument
from ...core.request import InferRequest, InferResponse
from ...engine.client.infer import GeneratingModel


def request_id(request: InferRequest) -> str:
    """The id by which the request can be cancelled: a sequence's stands for one that is missing."""
    return request.id or str(request.parameters.get("sequence_id") or "")


def wants_cancellation(request: InferRequest) -> bool:
    return "stop" in request.inputs and bool(request.inputs["stop"].data.any())


def cancel_request(request: InferRequest, model: GeneratingModel) -> InferResponse:
    """Cancel what the request names; the response to it.

    Raises:
        InvalidArgument: it has no id.
    """
    target = request_id(request)
    if not target:
        raise InvalidArgument("A request id must be provided for request cancellation", field="stop")
    model.cancel(target)
    return InferResponse((), final=True)
