"""The fastest server of v2's infer on the same libraries: it parses a request and returns its tensor.

    python -m charonia.bench.load.bare_infer HTTP_PORT GRPC_PORT

Charonia's endpoints are measured against it. No routes, no checks, no model: uvicorn and grpc.aio, orjson, numpy and
protobuf. Knows nothing of Charonia.
"""

from typing import Any

import numpy as np
import orjson

from .bare_server import read_body, serve_bare

NAME = "identity"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI handler."""
    body = await read_body(receive)
    headers = dict(scope["headers"])
    length = headers.get(b"inference-header-content-length")
    parts = _echo_json(body) if length is None else _echo_binary(body, int(length))
    answer = [(b"content-length", b"%d" % sum(map(len, parts)))]
    if length is not None:
        answer.append((b"inference-header-content-length", b"%d" % len(parts[0])))
    await send({"type": "http.response.start", "status": 200, "headers": answer})
    await send({"type": "http.response.body", "body": b"".join(parts)})


def _echo_binary(body: bytes, length: int) -> list[bytes]:
    [tensor] = orjson.loads(body[:length])["inputs"]
    data = np.frombuffer(body, np.float32, offset=length).reshape(tensor["shape"])
    output = {
        "name": "OUTPUT0",
        "datatype": "FP32",
        "shape": list(data.shape),
        "parameters": {"binary_data_size": data.nbytes},
    }
    return [_head(output), data.tobytes()]


def _echo_json(body: bytes) -> list[bytes]:
    [tensor] = orjson.loads(body)["inputs"]
    data = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": list(data.shape), "data": data.ravel().tolist()}
    return [_head(output)]


def _head(output: dict[str, Any]) -> bytes:
    return orjson.dumps({"model_name": NAME, "model_version": "1", "outputs": [output]})


async def _infer(request: Any, context: Any) -> Any:
    from tritonclient.grpc import service_pb2

    [tensor] = request.inputs
    data = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tensor.shape)
    response = service_pb2.ModelInferResponse(model_name=NAME, model_version="1", id=request.id)
    response.outputs.add(name="OUTPUT0", datatype="FP32", shape=data.shape)
    response.raw_output_contents.append(data.tobytes())
    return response


def main() -> None:
    import grpc
    from tritonclient.grpc import service_pb2

    method = grpc.unary_unary_rpc_method_handler(
        _infer,
        request_deserializer=service_pb2.ModelInferRequest.FromString,
        response_serializer=service_pb2.ModelInferResponse.SerializeToString,
    )
    serve_bare(app, {"ModelInfer": method})


if __name__ == "__main__":
    main()
