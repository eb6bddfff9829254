"""What a door that answers once takes of a model's stream."""

from ..core.gateway import Stream
from ..core.request import InferResponse


async def at_most_two(responses: Stream[InferResponse]) -> list[InferResponse]:
    """Enough of the stream to know whether it holds exactly one; the caller closes it."""
    answers: list[InferResponse] = []
    async for response in responses:
        answers.append(response)
        if len(answers) == 2:
            break
    return answers
