"""A tower with a memory: what it has made of an image is kept by the image's content, within a budget of bytes.

Lives in one event loop; computes as a classic model does, in a process of its own unless it is told otherwise.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import Internal, NotReady, Unavailable
from ...core.media import Encodable, plural_nouns
from ...core.media_models import AlignedWindow, EncodedMedium, TowerSpec
from ...core.metrics import Reading
from ...core.model import MemoryNeed, ReservedMemory
from ...core.request_context import RequestContext
from ...core.runtime import Arrays, Parameters
from ...processes.gc_tuning import release_memory_soon
from ...processes.patient_work import patient_work
from ..isolated.isolated_runtime import PATIENT_TOWER, TOWER, InstanceLost, IsolatableLoader
from ..model import ClassicModel
from .tower_backend import (
    DEEPSTACK,
    LENGTH,
    OWN_ALIGNER,
    OWN_ENCODER,
    QUANTIZATION,
    ROWS,
    read_response,
    tower_config,
    tower_request,
)
from .tower_files import read_tower_files
from .window_aligner import WindowAligner

_ENDPOINT = "media"
_NO_PARAMETERS: Parameters = {}

_SCRATCH = 128 << 20
"""Bytes that computing takes at least, beside weights."""

_RESTART_SECONDS = 60.0
"""For which media wait for a process in place of one that has ended, from when they learn of it. Beside streams one
takes many times as long to load as alone."""


class MediumKey(NamedTuple):
    """By what an encoded medium is found again: two of one key have the same rows, and the same readers."""

    digest: bytes
    tenant: str
    salt: str


@dataclass(slots=True, eq=False)
class _Encoding:
    """A computation that `waiters` requests wait for."""

    task: asyncio.Task[EncodedMedium]
    waiters: int = 0


class MediaTower:
    """A `MediaEncoder` over the tower of a checkpoint. `parameters`: of its instance, such as EXECUTION. Raises as
    `read_tower_files`."""

    def __init__(self, name: str, version: str, spec: TowerSpec, parameters: Parameters = _NO_PARAMETERS) -> None:
        directory = Path(spec.checkpoint)
        files = read_tower_files(directory, spec.dtype, spec.kinds)
        if spec.own_encoder:
            own = {OWN_ENCODER: spec.own_encoder, OWN_ALIGNER: spec.own_aligner, QUANTIZATION: spec.quantization}
            parameters = {**parameters, **own}
        config = tower_config(name, version, files, spec.gpu, parameters)
        loader: IsolatableLoader = TOWER if spec.own_encoder else PATIENT_TOWER
        self._model = ClassicModel(config, loader, directory)
        self._patient = loader is PATIENT_TOWER
        self._dtype = files.dtype
        self._spec = spec
        weights = loader.needs(directory, config.raw, config.parameters)
        scratch = MemoryNeed(max(_SCRATCH, files.bytes(spec.gpu is not None) // 4), spec.gpu)
        self.needs: Sequence[MemoryNeed] = (*weights, scratch, MemoryNeed(spec.cache_bytes))
        self._kept: OrderedDict[MediumKey, EncodedMedium] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[MediumKey, _Encoding] = {}
        self._queries = self._hits = self._shared = self._encoded = self._evictions = 0
        self._seconds = 0.0
        self._closing = False
        self._aligner = WindowAligner(self._compute_alignments)

    async def load(self) -> None:
        self._closing = False
        with patient_work.pending(self._patient):
            await self._model.load()

    async def unload(self) -> None:
        self._closing = True
        tasks = [encoding.task for encoding in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._aligner.close()
        self._kept.clear()
        self._kept_bytes = 0
        await self._model.unload()

    def reserved_memory(self) -> ReservedMemory:
        promised = sum(need.size for need in self.needs if need.gpu is None)
        return ReservedMemory(promised, promised - self._spec.cache_bytes + self._kept_bytes)

    async def encode(self, medium: Encodable, context: RequestContext, salt: str = "") -> EncodedMedium:
        tenant = "" if self._spec.share_cache else context.tenant
        key = MediumKey(medium.digest, tenant, salt)
        self._queries += 1
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._hits += 1
            return kept
        encoding = self._running.get(key)
        if encoding is None:
            encoding = self._running[key] = _Encoding(asyncio.create_task(self._encode(medium, key, context)))
        else:
            self._shared += 1
        encoding.waiters += 1
        try:
            return await asyncio.shield(encoding.task)
        except asyncio.CancelledError:
            if encoding.task.cancelled() and self._closing:
                raise Unavailable("the model is being unloaded") from None
            raise
        finally:
            encoding.waiters -= 1
            if not encoding.waiters and self._running.get(key) is encoding:
                del self._running[key]
                encoding.task.cancel()

    async def _encode(self, medium: Encodable, key: MediumKey, context: RequestContext) -> EncodedMedium:
        try:
            began = time.monotonic()
            outputs = await self._outputs(medium.inputs, context)
            encoded = EncodedMedium(int(outputs[LENGTH]), outputs[ROWS], self._dtype, outputs[DEEPSTACK])
            self._encoded += 1
            self._seconds += time.monotonic() - began
            self._keep(key, encoded)
            return encoded
        finally:
            running = self._running.get(key)
            if running is not None and running.task is asyncio.current_task():
                del self._running[key]

    async def _outputs(self, inputs: Arrays, context: RequestContext) -> Mapping[str, Any]:
        """What the tower makes of the inputs. A process that ends meanwhile may have been killed for any reason: the
        next one tries once more, without the others of an execution, any of which may have ended it. The messages of
        others' errors are for clients of a model of tensors."""
        latest: float | None = None
        encoder = f"what encodes {plural_nouns(self._spec.kinds) or 'texts'} for this model"
        lost = False
        try:
            while True:
                try:
                    with patient_work.pending(self._patient):  # not while no process runs: a load is pending itself
                        return await self._computed(inputs, context, alone=lost)
                except InstanceLost as error:
                    if lost:
                        raise Internal(f"{encoder} has ended twice while it computed this") from error
                    lost = True
                    latest = latest or time.monotonic() + _RESTART_SECONDS
                except NotReady as error:
                    latest = latest or time.monotonic() + _RESTART_SECONDS
                    if not await self._model.works_again_within(latest - time.monotonic()):
                        raise NotReady(f"{encoder} has ended, and is being started again") from error
        finally:
            release_memory_soon()  # a tower on the host keeps what it frees, whatever became of the request

    async def _computed(self, inputs: Arrays, context: RequestContext, alone: bool) -> Mapping[str, Any]:
        own = RequestContext(_ENDPOINT)
        own.tenant, own.background = context.tenant, context.background
        outputs: dict[str, Any] = {}
        async with aclosing(self._responses(inputs, own, alone)) as responses:
            async for response in responses:
                outputs |= read_response(response.outputs)
        return outputs

    def _responses(self, inputs: Arrays, context: RequestContext, alone: bool) -> Any:
        infer = self._model.infer_alone if alone else self._model.infer
        return infer(tower_request(inputs), context)

    async def align(self, window: AlignedWindow, context: RequestContext) -> Sequence[int]:
        if self._closing:
            raise Unavailable("the model is being unloaded")
        return await self._aligner.align(window, context)

    async def _compute_alignments(self, inputs: Arrays, context: RequestContext) -> bytes:
        rows: bytes = (await self._outputs(inputs, context))[ROWS]
        return rows

    def _keep(self, key: MediumKey, encoded: EncodedMedium) -> None:
        """Keep it in the place of those that were wanted longest ago, unless it takes the whole budget."""
        size = len(encoded.rows) + len(encoded.deepstack)
        if size > self._spec.cache_bytes:
            return
        self._kept[key] = encoded
        self._kept_bytes += size
        while self._kept_bytes > self._spec.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.rows) + len(oldest.deepstack)
            self._evictions += 1

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the bytes that are counted are those that are kept."""
        counted = sum(len(encoded.rows) + len(encoded.deepstack) for encoded in self._kept.values())
        assert counted == self._kept_bytes <= self._spec.cache_bytes
        assert all(encoding.waiters for encoding in self._running.values())

    def readings(self) -> Iterator[Reading]:
        yield Reading("charonia_tower_running", len(self._running))
        yield Reading("charonia_tower_images_total", self._encoded)
        yield Reading("charonia_tower_seconds_total", self._seconds)
        yield Reading("charonia_tower_batches_total", self._model.statistics().execution_count)
        yield Reading("charonia_tower_cache_queries_total", self._queries)
        yield Reading("charonia_tower_cache_hits_total", self._hits)
        yield Reading("charonia_tower_shared_total", self._shared)
        yield Reading("charonia_tower_cache_evictions_total", self._evictions)
        yield Reading("charonia_tower_cache_bytes", self._kept_bytes)
        yield from self._aligner.readings()
