"""The gRPC endpoint as a client sees it: one ModelStreamInfer stream for each request, through tritonclient's aio
client.

A stream is half-closed behind its request, so its end is the answer's end: nothing depends on `triton_final_response`,
which this client cannot ask for.
"""

from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import OK, RequestOptions, RequestResult, sampling
from .plan import Prompt


class GrpcSender:
    """Puts requests to a server at `address` (host:port), all over one channel."""

    def __init__(self, address: str, manner: RequestOptions) -> None:
        from tritonclient.grpc.aio import InferenceServerClient

        self._client = InferenceServerClient(address)
        self._manner = manner
        self._headers = {"authorization": f"Bearer {manner.api_key}"} if manner.api_key else None

    async def send(self, prompt: Prompt, new: int) -> RequestResult:
        import grpc

        heard = RequestResult(status=OK)
        stream = self._client.stream_infer(_once(_request(prompt, new, self._manner)), headers=self._headers)
        try:
            async for result, error in stream:
                _read(result, error, heard)
        except grpc.aio.AioRpcError as error:
            heard.status = f"gRPC {error.code().name}"
        finally:
            stream.cancel()
        if heard.status == OK and not heard.times:
            heard.status = "no token"
        return heard

    async def close(self) -> None:
        await self._client.close()


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _request(prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]:
    from tritonclient.grpc import InferRequestedOutput

    text = isinstance(prompt, str)
    name, datatype = ("text_input", "BYTES") if text else ("input_ids", "INT32")
    data = np.array([prompt.encode()], object) if isinstance(prompt, str) else np.array(prompt, np.int32)
    outputs = ["text_output", *(["num_input_tokens", "output_ids"] if manner.counted else [])]
    return {
        "model_name": manner.model,
        "inputs": [_input(name, datatype, data), _input("stream", "BOOL", np.array([True]))],
        "outputs": [InferRequestedOutput(output) for output in outputs],
        "parameters": sampling(new, manner),
    }


def _input(name: str, datatype: str, data: NDArray[Any]) -> Any:
    from tritonclient.grpc import InferInput

    made = InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data)
    return made


def _read(result: Any, error: Any, heard: RequestResult) -> None:
    now = perf_counter()
    if error is not None:
        heard.status = f"event: {error.message()}"[:80]
        return
    response = result.get_response()
    heard.frames += 1
    heard.size += response.ByteSize()
    if not response.outputs:
        return
    if _read_counts(result, heard):
        heard.times.append(now)


def _read_counts(result: Any, heard: RequestResult) -> bool:
    """Whether tokens came; without ids among the outputs, every response with outputs counts as one."""
    ids, prompt = result.as_numpy("output_ids"), result.as_numpy("num_input_tokens")
    if prompt is not None:
        heard.prompt_tokens = int(prompt[0])
    if ids is None:
        return True
    heard.tokens = max(0, heard.tokens) + ids.size
    return bool(ids.size)
