"""The response cache of `--cache-config`: responses by the request that they answer, least recently used out first.

Knows no models: an entry belongs to an owner, whose entries go with it. A request is known by its key, bytes.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument, Unsupported
from ..core.request import InferRequest, InferResponse
from ..core.tensor import Tensor

_ENTRY_OVERHEAD = 512
"""Bytes that an answer takes beside its tensors, about."""

_QUEUE_PARAMETERS = ("priority", "timeout")
"""Parameters that change when a question is answered, and not how."""


class _CachedResponse(NamedTuple):
    """`size`: bytes that it takes."""

    response: InferResponse
    size: int


class ResponseCache:
    """At most `size` bytes of answers; those that were asked for least lately make room."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._answers: OrderedDict[tuple[Hashable, bytes], _CachedResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def outstanding(self) -> int:
        """Bytes that it was promised, and does not hold yet."""
        return self.size - self.used

    def get(self, owner: Hashable, question: bytes) -> InferResponse | None:
        kept = self._answers.get((owner, question))
        if kept is None:
            return None
        self._answers.move_to_end((owner, question))
        return kept.response

    def put(self, owner: Hashable, question: bytes, answer: InferResponse) -> None:
        """A copy of it: what it was made from may change. One that is larger than all there is, is not kept."""
        size = _ENTRY_OVERHEAD + sum(_tensor_bytes(tensor.data) for tensor in answer.outputs)
        if size > self.size or (owner, question) in self._answers:
            return
        while self.used + size > self.size:
            self._evict(next(iter(self._answers)))
        outputs = tuple(msgspec.structs.replace(tensor, data=_read_only_copy(tensor.data)) for tensor in answer.outputs)
        self._answers[owner, question] = _CachedResponse(msgspec.structs.replace(answer, outputs=outputs), size)
        self.used += size

    def remove_owner(self, owner: Hashable) -> None:
        """Nobody will ask it again."""
        for key in [key for key in self._answers if key[0] == owner]:
            self._evict(key)

    def _evict(self, key: tuple[Hashable, bytes]) -> None:
        self.used -= self._answers.pop(key).size

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        assert self.used == sum(kept.size for kept in self._answers.values()) <= self.size


def cache_key(request: InferRequest, tenant: str = "") -> bytes:
    """What a model's answer depends on: inputs with types and shapes, which outputs are wanted, and parameters. Triton
    looks at the inputs' names and bytes alone. The tenant parts it, too: how quickly an answer comes would tell one
    tenant what another asked."""
    digest = blake2b(digest_size=32)
    told = {key: value for key, value in request.parameters.items() if key not in _QUEUE_PARAMETERS}
    tensors = [request.inputs[name] for name in sorted(request.inputs)]
    outline = [(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]
    wanted = None if request.outputs is None else sorted(request.outputs)
    digest.update(msgspec.msgpack.encode((tenant, outline, wanted, sorted(told.items()))))
    for tensor in tensors:
        _hash_tensor(tensor, digest)
    return digest.digest()


def _hash_tensor(tensor: Tensor, digest: Any) -> None:
    if tensor.datatype == "BYTES":
        digest.update(msgspec.msgpack.encode(tensor.data.ravel().tolist()))
    else:
        digest.update(np.ascontiguousarray(tensor.data).data)


def _tensor_bytes(data: NDArray[Any]) -> int:
    return data.nbytes + (sum(map(len, data.ravel())) if data.dtype.hasobject else 0)


def _read_only_copy(data: NDArray[Any]) -> NDArray[Any]:
    copy = data.copy()
    copy.flags.writeable = False
    return copy


def parse_cache_config(words: Iterable[str]) -> ResponseCache | None:
    """What the flag says, each time it is given: `local,size=<bytes>`; without it there is no cache.

    Raises:
        InvalidArgument: it says what it cannot; the message names the flag.
        Unsupported: it asks for another cache.
    """
    cache = None
    for word in words:
        implementation, _, setting = word.partition(",")
        name, _, value = setting.partition("=")
        if implementation != "local":
            raise Unsupported(f"--cache-config {word}: only the cache 'local' is served")
        if name != "size" or not value.isdecimal() or not int(value):
            raise InvalidArgument(f"--cache-config {word}: expected local,size=<bytes>")
        cache = ResponseCache(int(value))
    return cache
