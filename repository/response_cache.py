"""The response cache of `--cache-config`, and the model in front of which it stands.

Responses are kept by a key of their request, the least recently used leave first. Hits and misses are counted as Triton
does: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/response_cache.md.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, cast

import msgspec
import numpy as np

from ..core.errors import InvalidArgument, Unsupported
from ..core.gateway import ResponseStream
from ..core.metrics import QuantileSummary, Reading, StatisticDuration, VersionStatistics
from ..core.model import Capabilities, MeasuredModel, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import RequestContext

_ENTRY_OVERHEAD = 512
"""Bytes, roughly, that a response takes in addition to its tensors."""

_QUEUE_PARAMETERS = ("priority", "timeout")
"""Parameters that change when a request is answered, and not how."""

_REQUEST_SUMMARY_FAMILY = "nv_inference_request_summary_us"
"""Triton does not make it for a cached model."""


class _CachedResponse(NamedTuple):
    """A response and the bytes that it takes."""

    response: InferResponse
    size: int


class ResponseCache:
    """At most `size` bytes of responses, each found by its `owner`, a model, and a key of the request."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._responses: OrderedDict[tuple[Hashable, bytes], _CachedResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def outstanding(self) -> int:
        """Bytes that it was promised, and does not hold yet."""
        return self.size - self.used

    def get(self, owner: Hashable, key: bytes) -> InferResponse | None:
        cached = self._responses.get((owner, key))
        if cached is None:
            return None
        self._responses.move_to_end((owner, key))
        return cached.response

    def put(self, owner: Hashable, key: bytes, response: InferResponse) -> None:
        """Keep a response that is not larger than the cache; a copy, for its tensors' memory may be used again."""
        arrays = [tensor.data for tensor in response.outputs]
        strings = sum(len(text) for array in arrays if array.dtype.hasobject for text in array.flat)
        size = _ENTRY_OVERHEAD + sum(array.nbytes for array in arrays) + strings
        if size > self.size or (owner, key) in self._responses:
            return
        while self.used + size > self.size:
            self._evict(next(iter(self._responses)))
        self._responses[owner, key] = _CachedResponse(_read_only_copy(response), size)
        self.used += size

    def remove_owner(self, owner: Hashable) -> None:
        for entry in [entry for entry in self._responses if entry[0] == owner]:
            self._evict(entry)

    def _evict(self, entry: tuple[Hashable, bytes]) -> None:
        self.used -= self._responses.pop(entry).size

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        assert self.used == sum(cached.size for cached in self._responses.values()) <= self.size


def _read_only_copy(response: InferResponse) -> InferResponse:
    copies = [tensor.data.copy() for tensor in response.outputs]
    for copy in copies:
        copy.flags.writeable = False
    pairs = zip(response.outputs, copies, strict=True)
    outputs = tuple(msgspec.structs.replace(tensor, data=copy) for tensor, copy in pairs)
    return msgspec.structs.replace(response, outputs=outputs)


def cache_key(request: InferRequest, tenant: str = "") -> bytes:
    """The digest of all that a model's response depends on: inputs with types and shapes, the wanted outputs, and
    parameters; Triton's has the inputs' names and bytes alone. The tenant is in it for privacy: the time of a response
    would tell one tenant what another has asked."""
    digest = blake2b(digest_size=32)
    parameters = sorted((key, value) for key, value in request.parameters.items() if key not in _QUEUE_PARAMETERS)
    tensors = [request.inputs[name] for name in sorted(request.inputs)]
    outline = [(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]
    wanted = None if request.outputs is None else sorted(request.outputs)
    digest.update(msgspec.msgpack.encode((tenant, outline, wanted, parameters)))
    for tensor in tensors:
        if tensor.datatype == "BYTES":
            digest.update(msgspec.msgpack.encode(tensor.data.ravel().tolist()))
        else:
            digest.update(np.ascontiguousarray(tensor.data).data)
    return digest.digest()


@dataclass(slots=True)
class _LookupCounter:
    """The number of lookups, and their time: nanoseconds, and whole microseconds of each, as Triton counts."""

    summary: QuantileSummary
    count: int = 0
    ns: int = 0
    microseconds: int = 0

    def record(self, ns: int) -> None:
        self.count += 1
        self.ns += ns
        self.microseconds += ns // 1000
        if self.summary.quantiles:
            self.summary.observe(ns // 1000)

    def readings(self, kind: str, plural: str) -> Iterator[Reading]:
        yield Reading(f"nv_cache_num_{plural}_per_model", self.count)
        yield Reading(f"nv_cache_{kind}_duration_per_model", self.microseconds)
        if self.summary.quantiles:
            yield Reading(f"nv_cache_{kind}_summary_per_model", self.summary)


class CachedModel:
    """A model behind the cache: it computes only what the cache does not have.

    A request that the model answers with several responses, or none, is asked anew each time. `quantiles`: of the
    summaries of lookup times, none for no summaries.
    """

    def __init__(self, model: MeasuredModel, cache: ResponseCache, quantiles: Sequence[float] = ()) -> None:
        self.config = model.config
        self._model = model
        self._cache = cache
        self._hits = _LookupCounter(QuantileSummary(quantiles))
        self._misses = _LookupCounter(QuantileSummary(quantiles))
        self._last_hit_at = 0.0
        self._owner = object()
        """That of the responses that still hold."""

    async def load(self) -> None:
        await self._model.load()
        self.config = self._model.config

    async def unload(self) -> None:
        await self._model.unload()
        self.forget()

    def forget(self) -> None:
        """Let go of what the cache has of it, and keep nothing of what it is being asked: its steps have changed."""
        self._cache.remove_owner(self._owner)
        self._owner = object()

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        """Raises as the model does; errors are not cached."""
        begun = time.monotonic_ns()
        key = cache_key(request, context.tenant)
        owner = self._owner
        kept = self._cache.get(owner, key)
        looked = time.monotonic_ns() - begun
        if kept is not None:
            self._hits.record(looked)
            self._last_hit_at = time.time()
            yield kept
            return
        alone: InferResponse | None = None
        stream = cast("ResponseStream[InferResponse]", self._model.infer(request, context))
        async with aclosing(stream) as responses:
            first = True
            async for response in responses:
                if response.final and first:
                    self._keep(owner, key, response, looked)
                else:
                    alone = _read_only_copy(response) if first else None
                first = False
                yield response
        if alone is not None:
            self._keep(owner, key, alone, looked)

    def _keep(self, owner: object, key: bytes, response: InferResponse, looked: int) -> None:
        begun = time.monotonic_ns()
        if owner is self._owner:
            self._cache.put(owner, key, response)
        self._misses.record(looked + time.monotonic_ns() - begun)

    def stats(self) -> ModelStats:
        stats = self._model.stats()
        return replace(stats, success=stats.success + self._hits.count)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self_check=self._model.capabilities.self_check, measured=self)

    def statistics(self) -> VersionStatistics:
        """The model's, and the requests that it was not asked."""
        own = self._model.statistics()
        hits, misses = (StatisticDuration(lookups.count, lookups.ns) for lookups in (self._hits, self._misses))
        success = StatisticDuration(own.inference.success.count + hits.count, own.inference.success.ns + hits.ns)
        queue = replace(own.inference.queue, count=own.inference.queue.count + hits.count)
        inference = own.inference._replace(success=success, queue=queue, cache_hit=hits, cache_miss=misses)
        return replace(own, last_inference=max(own.last_inference, int(self._last_hit_at * 1000)), inference=inference)

    def count(self, context: RequestContext) -> None:
        self._model.count(context)

    def readings(self) -> Iterator[Reading]:
        """The model's, and those of the requests that it was not asked."""
        more = {
            "nv_inference_request_success": self._hits.count,
            "nv_inference_request_duration_us": self._hits.microseconds,
        }
        for reading in self._model.readings():
            if reading.family in more:
                yield reading._replace(value=cast(float, reading.value) + more[reading.family])
            elif reading.family != _REQUEST_SUMMARY_FAMILY:
                yield reading
        yield from self._hits.readings("hit", "hits")
        yield from self._misses.readings("miss", "misses")


def parse_cache_config(flags: Iterable[str]) -> ResponseCache | None:
    """The cache of the flags `local,size=<bytes>`, of which the last one counts; None without any.

    Raises:
        InvalidArgument: a flag has another form; the message names it.
        Unsupported: it asks for another cache.
    """
    cache = None
    for flag in flags:
        implementation, _, setting = flag.partition(",")
        name, _, value = setting.partition("=")
        if implementation != "local":
            raise Unsupported(f"--cache-config {flag}: only the cache 'local' is served")
        if name != "size" or not value.isdecimal() or not int(value):
            raise InvalidArgument(f"--cache-config {flag}: expected local,size=<bytes>")
        cache = ResponseCache(int(value))
    return cache
