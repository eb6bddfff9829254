"""The least that grpc.aio does for a ModelInfer: a server without us, which gives a request its tensors back.

python -m charonia.bench.load.bare_grpc PORT
"""

import sys
from typing import Any

import grpc
import uvloop
from tritonclient.grpc import service_pb2 as pb

from ..server_process import LOOPBACK


async def answer(request: Any, context: Any) -> Any:
    """A ModelInfer whose outputs are its inputs."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for tensor in request.inputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    response.raw_output_contents.extend(request.raw_input_contents)
    return response


async def serve(port: int) -> None:
    """Answer until the process ends."""
    longest = [(f"grpc.max_{direction}_message_length", -1) for direction in ("receive", "send")]
    server = grpc.aio.server(options=longest)
    parse, write = pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    methods = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer, parse, write)}
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
