"""Stand-ins of a GPU for steps that are recorded: an attention that reads rows on the device alone, a queue, and a
recorder that replays launches over the same buffers."""

import pytest
import torch
from torch import Tensor

from charonia.engine.attention.backend import AttentionBackend
from charonia.engine.attention.torch_attention import TorchStepAttention
from charonia.engine.gpu.graphs import CudaRecorder, Launches
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.device_step_computer import DeviceStepComputer
from charonia.engine.worker.loaded_rank import LoadedRank
from charonia.engine.worker.stage_link import StageLink
from tests.cuda_stand_in import StandInCuda


class DeviceAttention(AttentionBackend):
    """Reads rows on the device alone, as kernels do; padded places go to a block that belongs to nobody."""

    recordable_places = 8
    records_prompts = True

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        size = (spec.layers, 2, (blocks + 1) * spec.block_size, spec.kv_heads, spec.head_dim)
        self._cache = torch.full(size, torch.nan)

    @property
    def device_blocks(self) -> list[Tensor]:
        return []

    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        for cache, new in zip(self._cache[layer], (keys, values), strict=True):
            cache[batch.slots()] = new

    def begin_step(self, batch: StepBatch) -> TorchStepAttention:
        there, size = batch.on_device, self._spec.block_size
        places, ends = torch.arange(there.size), there.first_places + there.counts
        slots = torch.where(places < ends[-1], batch.slots(), self._cache.shape[2] - 1)
        blocks = there.block_ids[there.rows[batch.owners]]
        known = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
        seen = torch.arange(known.shape[1]) <= batch.positions.unsqueeze(-1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            keys, values = self._cache[layer]
            keys[slots], values[slots] = k, v
            group = q.shape[1] // k.shape[1]
            mine = (each[known].repeat_interleave(group, 2) for each in (keys, values))
            own_keys, own_values = (torch.where(seen[..., None, None], each, 0) for each in mine)
            scores = torch.einsum("nhd,nthd->nht", q, own_keys) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
            return torch.einsum("nht,nthd->nhd", weights, own_values).flatten(1)

        return TorchStepAttention(attend, self._spec)


def compute_on_queue(rank: LoadedRank) -> DeviceStepComputer:
    """Have the steps of a rank computed as on a device, whose queue is worked off at once."""
    before = rank.runner.computer
    link = rank.context.shard.link
    link = link if isinstance(link, StageLink) else None
    computer = DeviceStepComputer(before.decoder, before.attention, rank.rows, torch.device("cpu"), before.stores, link)
    rank.runner.computer = computer
    return computer


class Recorder:
    """A `CudaRecorder` over a stand-in for CUDA, whose replays compute: counts captures and replays. `failing`: how
    many captures to come are invalidated."""

    def __init__(self) -> None:
        self.captures = self.replays = self.failing = 0
        self.cuda, self._record = StandInCuda(), CudaRecorder(torch.device("cpu"))

    def __call__(self, launches: Launches) -> Launches:
        self.captures += 1

        def recorded() -> None:
            if self.failing:
                self.failing -= 1
                self.cuda.invalidate()
            launches()

        with pytest.MonkeyPatch.context() as patch:
            self.cuda.put_in_place(patch)
            check = self._record(recorded)

        def replay() -> None:
            self.replays += 1
            check()
            launches()

        return replay
