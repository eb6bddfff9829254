"""Requests that are small to send and large to read, for each kind of body that a server parses.

Bodies have the sizes that the caller asks for; knows nothing of what a server does with them.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2 as pb

from ..tiny_model import NAME

_MOST = 1 << 20
"""Strings that a request may have in an input, and numbers in one of `generate`."""

_HERE = "@"
"""Stands in a document where a long text goes."""

_V2 = f"/v2/models/{NAME}"
_FLOATS, _STRINGS, _FLAGS = (f"/v2/models/{name}/infer" for name in ("floats", "strings", "flags"))
_LENGTH = "Inference-Header-Content-Length"


class Attack(NamedTuple):
    """One request. `path`: empty for gRPC's ModelInfer; `body` makes it, anew each time."""

    name: str
    path: str
    body: Callable[[], bytes]
    headers: Mapping[str, str] = {}

    @property
    def internal(self) -> bool:
        """Whether v2 counts the error as the server's."""
        return self.name in ("infer: floats of another shape", "infer: empty arrays")


def attacks(json_size: int, raw_size: int) -> Iterator[Attack]:
    """All attacks, with JSON of about `json_size` bytes and raw tensors of `raw_size`."""
    yield from _of_json(json_size - 4096)
    yield from _of_raw(raw_size - 4096)
    yield from _of_grpc(raw_size - 65536)


def _filled(document: Any, item: str, size: int, last: str | None = None) -> bytes:
    """The document with as many of `item`, separated by commas, as make it about `size` bytes long."""
    text = json.dumps(document)
    count = size // (len(item) + 1)
    inside = ",".join([item] * count) if last is None else ",".join([item] * count + [last])
    return text.replace(f'"{_HERE}"', inside).encode()


def _numbered(document: Any, item: str, size: int) -> bytes:
    """As `_filled`, each item with its number."""
    count = size // (len(item) + 6)
    return json.dumps(document).replace(f'"{_HERE}": 0', ",".join([item % n for n in range(count)])).encode()


def _tensor(name: str, datatype: str, shape: list[Any], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, **more}]}


def _of_json(size: int) -> Iterator[Attack]:
    here, model = [_HERE], {"model": NAME}
    chat, text = "/v1/chat/completions", "/v1/completions"
    hello = [{"role": "user", "content": "hello"}]

    def of(name: str, path: str, document: Any, item: str, last: str | None = None) -> Attack:
        return Attack(name, path, lambda: _filled(document, item, size, last))

    def many(name: str, path: str, document: Any, item: str) -> Attack:
        return Attack(name, path, lambda: _numbered(document, item, size))

    def long(name: str, path: str, document: Any, part: str) -> Attack:
        """A body with one long string."""
        text = json.dumps(document)
        return Attack(name, path, lambda: text.replace(_HERE, part * (size // len(part))).encode())

    half = size // 2
    yield of("infer: floats", _FLOATS, _tensor("IN", "FP32", [half], data=here), "1")
    yield of("infer: real floats", _FLOATS, _tensor("IN", "FP32", [size // 4], data=here), "0.5")
    yield of("infer: floats, nested", _FLOATS, _tensor("IN", "FP32", [size // 4], data=here), "[1]")
    yield of("infer: floats, the last wrong", _FLOATS, _tensor("IN", "FP32", [half + 1], data=here), "1", '"x"')
    yield of("infer: floats, cut off", _FLOATS, _tensor("IN", "FP32", [half + 1], data=here), "1", "")
    yield of("infer: floats of another shape", _FLOATS, _tensor("IN", "FP32", [1], data=here), "1")
    yield of("infer: floats of another type", _FLOATS, _tensor("IN", "INT64", [half], data=here), "1")
    yield of("infer: floats under another name", _FLOATS, _tensor("X", "FP32", [half], data=here), "1")
    yield of("infer: empty arrays", _FLOATS, _tensor("IN", "FP32", [1], data=here), "[]")
    yield of("infer: strings", _STRINGS, _tensor("IN", "BYTES", [size // 3], data=here), '""')
    yield of("infer: booleans", _FLAGS, _tensor("IN", "BOOL", [size // 5], data=here), "true")
    yield of("infer: input_ids", f"{_V2}/infer", _tensor("input_ids", "INT32", [half], data=here), "1")
    yield of("infer: inputs", _FLOATS, {"inputs": here}, "{}")
    yield of(
        "infer: inputs of one name",
        _FLOATS,
        {"inputs": here},
        json.dumps(_tensor("IN", "FP32", [0], data=[])["inputs"][0]),
    )
    yield of("infer: outputs", _FLOATS, _tensor("IN", "FP32", [1], data=[1]) | {"outputs": here}, "{}")
    yield of("infer: shape", _FLOATS, _tensor("IN", "FP32", here, data=[1]), "1")
    yield of("infer: what nobody knows", _FLOATS, {"x": here, **_tensor("IN", "FP32", [1], data=[1])}, "{}")
    yield many(
        "infer: parameters", _FLOATS, {"parameters": {_HERE: 0}, **_tensor("IN", "FP32", [1], data=[1])}, '"a%d":0'
    )
    yield many("infer: members", _FLOATS, {_HERE: 0}, '"a%d":0')
    yield long("infer: id", _FLOATS, {"id": _HERE, **_tensor("IN", "FP32", [1], data=[1])}, "x")
    yield long("infer: a number", _FLOATS, {"id": _HERE}, "1")
    yield Attack("infer: depth", _FLOATS, lambda: b'{"inputs":' + b"[" * size)
    yield Attack("infer: one text without end", _FLOATS, lambda: b'{"inputs":"' + b"x" * size)
    yield Attack("infer: backslashes", _FLOATS, lambda: b'{"inputs":"' + b"\\" * size)
    yield Attack("infer: digits", _FLOATS, lambda: b'{"inputs":' + b"1" * size + b"}")
    yield Attack("infer: spaces", _FLOATS, lambda: b'{"inputs":' + b" " * size + b"[]}")
    yield of("generate: input_ids", f"{_V2}/generate", {"input_ids": here}, "1")
    yield of("generate: stop words", f"{_V2}/generate", {"text_input": "a", "stop_words": here}, '"a"')
    yield of("generate: stop tokens", f"{_V2}/generate", {"text_input": "a", "stop_token_ids": here}, "1")
    yield of("generate: what nobody knows", f"{_V2}/generate", {"text_input": "a", "x": here}, "1")
    for door in ("generate", "generate_stream"):  # as many as are taken, which come back
        path, few = f"/v2/models/floats/{door}", min(size, _MOST * len("1.5,"))
        yield Attack(f"{door}: floats", path, partial(_filled, {"IN": here}, "1.5", few, None))
    yield many("generate: parameters", f"{_V2}/generate", {"text_input": "a", _HERE: 0}, '"a%d":0')
    yield long("generate: text", f"{_V2}/generate", {"text_input": _HERE}, "x")
    yield of("completions: stop tokens", text, {**model, "prompt": "a", "stop_token_ids": here}, "1")
    yield of("completions: stop strings", text, {**model, "prompt": "a", "stop": here}, '"a"')
    yield of("completions: bad words", text, {**model, "prompt": "a", "bad_words": here}, '"a"')
    yield of("completions: token ids", text, {**model, "prompt": here}, "1")
    yield of("completions: lists of token ids", text, {**model, "prompt": here}, "[1]")
    yield of("completions: texts", text, {**model, "prompt": here}, '"a"')
    yield many("completions: bias", text, {**model, "prompt": "a", "logit_bias": {_HERE: 0}}, '"%d":1')
    yield of("completions: what nobody knows", text, {**model, "prompt": "a", "x": here}, "1")
    yield of("completions: best_of", text, {**model, "prompt": "a", "best_of": here}, "1")
    yield long("completions: text", text, {**model, "prompt": _HERE}, "x ")
    yield long("completions: wide text", text, {**model, "prompt": _HERE}, "\U0001f600")
    yield long("completions: escapes", text, {**model, "prompt": _HERE}, "\\u00e9")
    yield long("completions: salt", text, {**model, "prompt": "a", "cache_salt": _HERE}, "x")
    yield long("completions: model", text, {"model": _HERE, "prompt": "a"}, "x")
    yield of("chat: messages", chat, {**model, "messages": here}, '{"role":"user","content":"a"}')
    yield of("chat: empty messages", chat, {**model, "messages": here}, "{}")
    yield of(
        "chat: parts", chat, {**model, "messages": [{"role": "user", "content": here}]}, '{"type":"text","text":"a"}'
    )
    yield of("chat: variables", chat, {**model, "messages": hello, "chat_template_kwargs": {"x": here}}, "1")
    yield of("chat: tools", chat, {**model, "messages": hello, "tools": here}, "{}")
    yield of("tokenize: messages", "/tokenize", {**model, "messages": here}, '{"role":"user","content":"a"}')
    yield long("tokenize: text", "/tokenize", {**model, "prompt": _HERE}, "a ")
    yield of("detokenize", "/detokenize", {**model, "tokens": here}, "1")
    yield of("embeddings", "/v1/embeddings", {**model, "input": here}, '"a"')
    yield of("embeddings: ids", "/v1/embeddings", {**model, "input": here}, "[1]")
    yield of("rerank", "/v1/rerank", {**model, "query": "a", "documents": here}, '"a"')
    yield of("logging", "/v2/logging", {"x": here}, "1")
    yield of("trace", "/v2/trace/setting", {"trace_level": here}, '"OFF"')
    yield of("index", "/v2/repository/index", {"x": here}, "{}")
    yield long(
        "load: file", "/v2/repository/models/floats/load", {"parameters": {"config": "{}", "file:1/a": _HERE}}, "AAAA"
    )
    yield of("load", "/v2/repository/models/floats/load", {"parameters": {"config": here}}, "{}")


def _mixed(name: str, path: str, document: dict[str, Any], data: Callable[[int], bytes], size: int) -> Attack:
    head = json.dumps(document).encode()
    return Attack(name, path, lambda: head + data(size), {_LENGTH: str(len(head))})


def _zeros(size: int) -> bytes:
    return bytes(size)


def _texts(size: int) -> bytes:
    return b"\1\0\0\0a" * (size // 5)


def _of_raw(size: int) -> Iterator[Attack]:
    size -= size % 20
    binary = {"parameters": {"binary_data_size": size}}
    back = {"outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}

    def of(
        name: str, path: str, tensor: dict[str, Any], more: Any = back, data: Callable[[int], bytes] = _zeros
    ) -> Attack:
        return _mixed(name, path, {**tensor, **more}, data, size)

    yield of("raw: empty strings", _STRINGS, _tensor("IN", "BYTES", [size // 4], **binary))
    yield of("raw: empty strings of another count", _STRINGS, _tensor("IN", "BYTES", [1], **binary))
    yield of("raw: empty strings under another name", _STRINGS, _tensor("X", "BYTES", [size // 4], **binary))
    yield of("raw: empty strings where floats are", _FLOATS, _tensor("IN", "BYTES", [size // 4], **binary))
    yield of("raw: short strings", _STRINGS, _tensor("IN", "BYTES", [size // 5], **binary), back, _texts)
    yield of(
        "raw: one string",
        _STRINGS,
        _tensor("IN", "BYTES", [1], **binary),
        back,
        lambda n: struct.pack("<I", n - 4) + bytes(n - 4),
    )
    yield of("raw: strings, back as JSON", _STRINGS, _tensor("IN", "BYTES", [size // 4], **binary), {})
    few = min(size // 5, _MOST) * 5
    million = _tensor("IN", "BYTES", [few // 5], parameters={"binary_data_size": few})
    yield _mixed("raw: a million strings", _STRINGS, {**million, **back}, _texts, few)
    yield _mixed("raw: a million strings, back as JSON", _STRINGS, million, _texts, few)
    yield of("raw: floats", _FLOATS, _tensor("IN", "FP32", [size // 4], **binary))
    yield of("raw: floats, back as JSON", _FLOATS, _tensor("IN", "FP32", [size // 4], **binary), {})
    yield of(
        "raw: long floats, back as JSON",
        _FLOATS,
        _tensor("IN", "FP32", [size // 4], **binary),
        {},
        lambda n: struct.pack("<f", 0.1234567) * (n // 4),
    )
    yield of(
        "raw: NaN, back as JSON",
        _FLOATS,
        _tensor("IN", "FP32", [size // 4], **binary),
        {},
        lambda n: struct.pack("<f", float("nan")) * (n // 4),
    )
    yield of(
        "raw: classes",
        _FLOATS,
        _tensor("IN", "FP32", [size // 4], **binary),
        {"outputs": [{"name": "OUT", "parameters": {"classification": size}}]},
    )
    yield of("raw: flags", _FLAGS, _tensor("IN", "BOOL", [size], **binary))
    yield of("raw: flags, back as JSON", _FLAGS, _tensor("IN", "BOOL", [size], **binary), {})
    yield of("raw: input_ids", f"{_V2}/infer", _tensor("input_ids", "INT32", [size // 4], **binary), {})
    yield Attack("raw: nothing but floats", _FLOATS, lambda: bytes(size), {_LENGTH: "0"})


def _message(model: str, name: str, datatype: str, count: int) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[count])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor])


def _of_grpc(size: int) -> Iterator[Attack]:
    def raw(name: str, message: Any, data: Callable[[int], bytes] = _zeros) -> Attack:
        # A length-delimited field of the message, behind the others, is as good as one set in it.
        return Attack(name, "", lambda: message.SerializeToString() + _delimited(7, data(size)))

    def typed(name: str, message: Any, contents: Callable[[], bytes]) -> Attack:
        def body() -> bytes:
            [tensor] = message.inputs
            inner = tensor.SerializeToString() + _delimited(5, contents())
            return _delimited(1, message.model_name.encode()) + _delimited(5, inner)

        return Attack(name, "", body)

    size -= size % 20
    yield raw("grpc: empty strings", _message("strings", "IN", "BYTES", size // 4))
    yield raw("grpc: empty strings under another name", _message("strings", "X", "BYTES", size // 4))
    yield raw("grpc: short strings", _message("strings", "IN", "BYTES", size // 5), _texts)
    few = min(size // 5, _MOST)
    yield raw("grpc: a million strings", _message("strings", "IN", "BYTES", few), lambda _: _texts(few * 5))
    yield typed(
        "grpc: a million typed strings", _message("strings", "IN", "BYTES", few), lambda: _delimited(8, b"a") * few
    )
    yield raw("grpc: floats", _message("floats", "IN", "FP32", size // 4))
    yield raw("grpc: flags", _message("flags", "IN", "BOOL", size))
    yield raw("grpc: input_ids", _message(NAME, "input_ids", "INT32", size // 4))
    yield typed("grpc: typed floats", _message("floats", "IN", "FP32", size // 4), lambda: _delimited(6, bytes(size)))
    yield typed("grpc: typed ids", _message(NAME, "input_ids", "INT32", size), lambda: _delimited(2, bytes(size)))
    yield typed("grpc: typed flags", _message("flags", "IN", "BOOL", size), lambda: _delimited(1, bytes(size)))
    yield typed(
        "grpc: typed strings", _message("strings", "IN", "BYTES", size // 2), lambda: _delimited(8, b"") * (size // 2)
    )
    yield Attack(
        "grpc: inputs",
        "",
        lambda: _message("floats", "IN", "FP32", 1).SerializeToString() + _delimited(5, b"") * (size // 2),
    )
    yield Attack(
        "grpc: raw tensors",
        "",
        lambda: _message("floats", "IN", "FP32", 1).SerializeToString() + _delimited(7, b"") * (size // 2),
    )
    yield Attack(
        "grpc: outputs",
        "",
        lambda: _message("floats", "IN", "FP32", 1).SerializeToString() + _delimited(6, b"") * (size // 2),
    )
    yield Attack(
        "grpc: shape",
        "",
        lambda: (
            pb.ModelInferRequest(model_name="floats").SerializeToString() + _delimited(5, _delimited(3, b"\1" * size))
        ),
    )
    yield Attack(
        "grpc: parameters",
        "",
        lambda: pb.ModelInferRequest(model_name="floats").SerializeToString() + _parameters(size),
    )
    yield Attack(
        "grpc: fields nobody knows",
        "",
        lambda: pb.ModelInferRequest(model_name="floats").SerializeToString() + _delimited(99, b"") * (size // 3),
    )


def _parameters(size: int) -> bytes:
    return b"".join([_delimited(4, _delimited(1, b"%06d" % n) + _delimited(2, b"\x08\x01")) for n in range(size // 16)])


def _delimited(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
