"""grpc.reflection.v1alpha.ServerReflection: tools such as grpcurl ask the server for the messages of its service, where
they have no file of them. Of package grpcio-reflection, which may not be installed."""

import grpc
from tritonclient.grpc import service_pb2


def serve_reflection(server: grpc.aio.Server) -> None:
    """Add the service to `server`, which has not begun. It tells of the service whose messages tritonclient publishes:
    those of the health check every tool has."""
    from grpc_reflection.v1alpha.reflection import SERVICE_NAME, enable_server_reflection

    inference = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    enable_server_reflection((inference, SERVICE_NAME), server)
