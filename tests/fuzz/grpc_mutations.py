"""Mutants for the gRPC endpoints: ModelInferRequests with a wrong field, and bytes that are no message.

A mutant is drawn from (seed, number) alone: each can be made again without those before it.
"""

import struct
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple, TypeAlias

from .json_mutations import FIELDS, STRANGE

Message: TypeAlias = Any
"""A protobuf message: the published modules are generated at import and have no types."""

_BYTES_SHARE = 0.3
_TEXTS = tuple(each for each in STRANGE if isinstance(each, str))
_INTEGERS = (-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**32, 2**62, 2**63 - 1, -(2**63))
_DATATYPES = (
    *("BOOL", "UINT8", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES"),
    *("", "int32", "STRING", "\0"),
)
_KINDS = ("bool_param", "int64_param", "uint64_param", "double_param", "string_param")
_TYPED = (
    *("bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents", "fp32_contents"),
    *("fp64_contents", "bytes_contents"),
)


class RpcMutant(NamedTuple):
    """`data` is sent as the one message of a call: ModelStreamInfer if `streaming`, else ModelInfer."""

    kind: str
    streaming: bool
    data: bytes


def valid_message(random: Random, model: str, streaming: bool) -> Message:
    """A valid request: the prompt as text or ids, raw or typed, with some settings."""
    from tritonclient.grpc import service_pb2 as pb

    message = pb.ModelInferRequest(model_name=model, id="a")
    raw = random.random() < 0.5
    if random.random() < 0.5:
        _add(message, "text_input", "BYTES", [1], struct.pack("<I", 5) + b"Hello" if raw else [b"Hello"])
    else:
        _add(message, "input_ids", "INT32", [3], struct.pack("<iii", 5, 6, 7) if raw else [5, 6, 7])
    _add(message, "stream", "BOOL", [1], bytes([streaming]) if raw else [streaming])
    message.parameters["max_tokens"].int64_param = 3
    message.parameters["temperature"].double_param = 0.7
    message.outputs.add(name="text_output")
    message.outputs.add(name="output_ids")
    return message


def _add(message: Message, name: str, datatype: str, shape: list[int], data: Any) -> None:
    given = message.inputs.add(name=name, datatype=datatype, shape=shape)
    if isinstance(data, bytes):
        message.raw_input_contents.append(data)
    else:
        field = {"BYTES": "bytes_contents", "INT32": "int_contents", "BOOL": "bool_contents"}[datatype]
        getattr(given.contents, field).extend(data)


def rpc_mutant(model: str, seed: int, number: int) -> RpcMutant:
    """The mutant of this number."""
    random = Random(f"{seed}:rpc:{number}")
    streaming = random.random() < 0.6
    message = valid_message(random, model, streaming)
    if random.random() < _BYTES_SHARE:
        kind = random.choice(list(OF_THE_BYTES))
        return RpcMutant(kind, streaming, OF_THE_BYTES[kind](random, message.SerializeToString()))
    kind = random.choice(list(OF_THE_MESSAGE))
    for _ in range(random.choice((1, 1, 2, 3))):
        OF_THE_MESSAGE[kind](random, message)
    return RpcMutant(kind, streaming, message.SerializeToString())


def _some(random: Random, repeated: Any) -> Any:
    return random.choice(repeated) if len(repeated) else repeated.add()


def wrong_name(random: Random, message: Message) -> None:
    text = random.choice((*_TEXTS, *FIELDS, "x" * 100_000))
    owner, field = random.choice(((message, "model_name"), (message, "model_version"), (message, "id"), (None, "name")))
    setattr(owner or _some(random, message.inputs), field, text)


def wrong_datatype(random: Random, message: Message) -> None:
    _some(random, message.inputs).datatype = random.choice(_DATATYPES)


def wrong_shape(random: Random, message: Message) -> None:
    given = _some(random, message.inputs)
    kept = list(given.shape) if random.random() < 0.3 else []
    length = random.choice((0, 1, 1, 2, 3, 65, 1000))
    given.shape[:] = kept + [random.choice(_INTEGERS) for _ in range(length)]


def wrong_contents(random: Random, message: Message) -> None:
    """Typed contents of any type, in addition to those or the raw ones that are there."""
    field = random.choice(_TYPED)
    values: dict[str, Any] = {"bool_contents": True, "bytes_contents": b"\xff\xfe", "fp32_contents": float("nan")}
    values["fp64_contents"] = random.choice((float("nan"), float("inf"), 1e308))
    count = random.choice((1, 3, 1000))
    getattr(_some(random, message.inputs).contents, field).extend([values.get(field, 7)] * count)


def wrong_raw(random: Random, message: Message) -> None:
    blobs = message.raw_input_contents
    lying = struct.pack("<I", random.choice((0, 1, 6, 2**31, 2**32 - 1)))
    blob = random.choice((b"", b"\0", lying, lying + b"Hello", b"\xff" * 12, random.randbytes(1000), b"\0" * 100_000))
    if blobs and random.random() < 0.7:
        blobs[random.randrange(len(blobs))] = blob
    else:
        blobs.append(blob)


def missing_part(random: Random, message: Message) -> None:
    part = random.choice((message.inputs, message.outputs, message.raw_input_contents))
    if part:
        del part[random.randrange(len(part))]


def repeated_part(random: Random, message: Message) -> None:
    part = random.choice((message.inputs, message.outputs))
    if part:
        part.extend([part[0]] * random.choice((1, 1, 500)))


def wrong_parameter(random: Random, message: Message) -> None:
    """A parameter of the request, an input or an output, with a value of any kind or none."""
    owners = (message, message, message, _some(random, message.inputs), _some(random, message.outputs))
    shared = ("shared_memory_region", "shared_memory_byte_size", "classification", "binary_data", "\0")
    parameter = random.choice(owners).parameters[random.choice((*FIELDS, *shared))]
    kind = random.choice((*_KINDS, ""))
    values: dict[str, Any] = {
        "bool_param": random.random() < 0.5,
        "int64_param": random.choice(_INTEGERS),
        "uint64_param": random.choice((0, 1, 2**63, 2**64 - 1)),
        "double_param": random.choice((float("nan"), float("inf"), -1.0, 0.5, 1e308, 1e-320)),
        "string_param": random.choice((*_TEXTS, '{"max_tokens": 3}', "NaN", "[" * 5000, "9" * 5000)),
    }
    if kind:
        setattr(parameter, kind, values[kind])


def many_requests(random: Random, message: Message) -> None:
    message.parameters["n"].int64_param = random.choice((2, 128, 129))
    message.parameters["max_tokens"].int64_param = random.choice((1, 250, 10**6))


OF_THE_MESSAGE: Mapping[str, Callable[[Random, Message], None]] = {
    each.__name__: each
    for each in (
        *(wrong_name, wrong_datatype, wrong_shape, wrong_contents, wrong_raw, missing_part, repeated_part),
        *(wrong_parameter, many_requests),
    )
}


def truncated_message(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data))]


def flipped_message(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randint(1, 6)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def random_message(random: Random, data: bytes) -> bytes:
    return random.randbytes(random.choice((0, 1, 20, 1000, 100_000)))


def unknown_message_fields(random: Random, data: bytes) -> bytes:
    """Fields from 900 on of every wire type, groups without an end among them."""
    tags = (b"\xa0\x38\x01", b"\xa1\x38" + bytes(8), b"\xa2\x38\x03abc", b"\xa3\x38", b"\xa3\x38\xa4\x38", b"\xa7\x38")
    return data + b"".join(random.choices(tags, k=random.choice((1, 3, 1000))))


def other_message(random: Random, data: bytes) -> bytes:
    """A valid message of another kind, or the same one twice, which protobuf merges."""
    nested = data
    for _ in range(random.choice((1, 50, 120))):
        nested = b"\x2a" + _varint(len(nested)) + nested
    return random.choice((data + data, nested, b"\x0a\x03abc", data[::-1]))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


OF_THE_BYTES: Mapping[str, Callable[[Random, bytes], bytes]] = {
    each.__name__: each
    for each in (truncated_message, flipped_message, random_message, unknown_message_fields, other_message)
}
