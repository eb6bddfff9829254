"""A v2 infer request as a load sends it, again and again the same: its bytes, made once from tensors."""

import struct
from collections.abc import Sequence
from time import perf_counter
from urllib.parse import quote

import msgspec
import numpy as np
import orjson

from ...core.tensor import Tensor
from .driver import OK, RequestResult, read_error
from .http_client import HttpClient
from .plan import Prompt


class InferPayload(msgspec.Struct, frozen=True):
    """The body of a request over HTTP, whose first `header_length` bytes are JSON."""

    body: bytes
    header_length: int


def encode_infer_payload(inputs: Sequence[Tensor]) -> InferPayload:
    """A request with all of its tensors in binary, the answer's too."""
    parts = [_raw_bytes(tensor) for tensor in inputs]
    described = [
        {
            "name": tensor.name,
            "shape": tensor.shape,
            "datatype": tensor.datatype,
            "parameters": {"binary_data_size": len(part)},
        }
        for tensor, part in zip(inputs, parts, strict=True)
    ]
    header = orjson.dumps({"inputs": described, "parameters": {"binary_data_output": True}})
    return InferPayload(b"".join([header, *parts]), len(header))


def _raw_bytes(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(text)) + text for text in tensor.data.ravel().tolist())
    return np.ascontiguousarray(tensor.data).tobytes()


class InferSender:
    """Puts one request to a model; an answer counts as one frame, and prompts as nothing."""

    def __init__(self, client: HttpClient, model: str, payload: InferPayload) -> None:
        self._client, self._payload = client, payload
        self._path = f"/v2/models/{quote(model, safe='')}/infer"
        self._headers = f"Inference-Header-Content-Length: {payload.header_length}\r\n"

    async def send(self, prompt: Prompt, new: int) -> RequestResult:
        answer = await self._client.post(self._path, self._payload.body, self._headers)
        if answer.status != 200:
            return RequestResult(status=f"HTTP {answer.status}", detail=read_error(answer.body), size=answer.size)
        return RequestResult(status=OK, times=[perf_counter()], tokens=0, frames=1, size=answer.size)

    async def close(self) -> None:
        self._client.close()
