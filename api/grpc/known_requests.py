"""ModelInferRequests that are alike but for their numbers: protobuf reads the first of them alone."""

from collections.abc import Mapping
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import CharoniaError
from ...core.request import ParameterValue
from ...processes.client_shared_memory import SharedMemoryRegistry
from ..infer_call import InferCall
from ..request_outlines import LONGEST_OUTLINE, OUTLINE_DTYPES, RequestOutline, keep_latest, outline_of
from .messages import parse_infer_message
from .settings import Caller
from .wire_format import LARGE_BYTES, ProtoMessage, delimiter, deserialize_infer

_RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_NO_REGIONS = SharedMemoryRegistry()
_ANYONE = Caller()


class KnownRequest(msgspec.Struct, frozen=True):
    """A ModelInferRequest, by the names of its fields as far as handlers read them. `call`: what it asks for."""

    model_name: str
    model_version: str
    call: InferCall
    id: str = ""
    parameters: Mapping[str, Any] = {}

    def with_parameters(self, parameters: Mapping[str, ParameterValue]) -> InferCall:
        """What it asks for, with parameters that its metadata give it."""
        if not parameters:
            return self.call
        request = msgspec.structs.replace(self.call.request, parameters=parameters)
        return msgspec.structs.replace(self.call, request=request)


class KnownRequests:
    """The latest requests that had neither an id nor parameters, by what stands in front of their first tensor's bytes,
    and where that ended in messages of a size."""

    def __init__(self) -> None:
        self._outlines: dict[bytes, tuple[str, str, RequestOutline]] = {}
        self._ends: dict[int, int] = {}

    def read(self, data: bytes) -> KnownRequest | ProtoMessage:
        """The request that an encoded message is; a message unless it is known. Raises as `deserialize_infer`."""
        end = self._ends.get(len(data))
        if end is not None:
            known = self._outlines.get(data[:end])
            call = None if known is None else known[2].fill(data, end)
            if known is not None and call is not None:
                return KnownRequest(known[0], known[1], call)
        message = deserialize_infer(data)
        if not message.id and len(data) <= LARGE_BYTES:
            self._remember(data, message)
        return message

    def _remember(self, data: bytes, message: ProtoMessage) -> None:
        """Keep what `data` is without its tensors, if these are its last fields, and one for each input."""
        raw = message.raw_input_contents
        if not raw or len(raw) != len(message.inputs) or message.parameters:
            return
        if any(tensor.parameters for tensors in (message.inputs, message.outputs) for tensor in tensors):
            return
        if any(tensor.datatype not in OUTLINE_DTYPES for tensor in message.inputs):  # before it is parsed for nothing
            return
        marks = [delimiter(_RAW, len(contents)) for contents in raw]
        end = len(data) - sum(map(len, raw)) - sum(map(len, marks[1:]))
        tail = b"".join([part for mark, contents in zip(marks, raw, strict=True) for part in (mark, contents)])
        if end > LONGEST_OUTLINE or not data.endswith(tail):
            return
        try:
            outline = outline_of(parse_infer_message(message, _NO_REGIONS, _ANYONE), tuple(marks[1:]))
        except CharoniaError:  # which its handler finds again, and tells
            return
        if outline is not None:
            keep_latest(self._outlines, data[:end], (message.model_name, message.model_version, outline))
            keep_latest(self._ends, len(data), end)
