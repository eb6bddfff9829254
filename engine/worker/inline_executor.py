"""An executor of one rank in this process."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import msgspec
import torch

from ...core.adapter import Adapter
from ...core.eager_reason import EagerReason
from ...core.errors import CharoniaError
from ...scheduler.plan import MaskSource, StepPlan, StepResult
from ..checkpoint.build_context import Shard
from ..checkpoint.partition import PipelineStage
from ..config import EngineConfig
from .devices import assign_device
from .executor import NO_COPIES, CacheCopies, CachePlaces, Capacity, ImageLayout, ProgressCallback
from .image_files import ImageDirectorySettings, RankImages
from .loaded_rank import LoadedRank, load_rank


class InlineExecutor:
    """One rank, for one thread of this process. A step that our kernels compute begins when it is executed, on their
    threads; the caller helps, and computes everything else, when it asks for the result. The step's future raises the
    step's error."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._rank: LoadedRank | None = None
        self._images: RankImages | None = None
        self._futures: deque[_InlineFuture] = deque()
        self._threads_before: int | None = None

    def load(self, progress: ProgressCallback) -> Capacity:
        """See `Executor.load`; raises what `load_rank` does."""
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._config.threads_each())
        config = msgspec.structs.replace(self._config, device=assign_device(self._config))
        shard = Shard(stage=PipelineStage(layer_counts=config.parallel.layers))
        self._rank = load_rank(config, shard, lambda fraction: progress("weights", fraction))
        return self._rank.capacity()

    def allocate(self, blocks: int, host_blocks: int = 0, snapshots: int = 0, host_snapshots: int = 0) -> None:
        self.rank.runner.allocate(blocks, host_blocks, snapshots, host_snapshots)

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> "_InlineFuture":
        self.rank.runner.begin_step(plan, masks)
        future = _InlineFuture(self._finish_oldest)
        self._futures.append(future)
        return future

    def load_adapter(self, path: str) -> Future[Adapter]:
        return self.rank.loaded_adapters.load(path)

    def unload_adapter(self, digest: str) -> None:
        self.rank.loaded_adapters.unload(digest)

    def open_directory(self, settings: ImageDirectorySettings) -> RankImages:
        self._images = self.rank.open_directory(settings)
        return self._images

    @property
    def image_layouts(self) -> list[ImageLayout]:
        return [self.rank.runner.places.layout]

    @torch.inference_mode()
    def take_places(self, places: CachePlaces) -> Callable[[], list[bytes]]:
        self._finish(all_steps=False)
        read = self.rank.runner.places.take(places)
        return lambda: [read()]

    @torch.inference_mode()
    def put_places(self, places: CachePlaces, content: Sequence[memoryview], copies: CacheCopies = NO_COPIES) -> None:
        self._finish(all_steps=len(copies.blocks) + len(copies.states) > 0)
        self.rank.runner.make_copies(*copies)
        self.rank.runner.places.put(places, content[0])

    def _finish(self, all_steps: bool) -> None:
        """Compute what is to come before the cache is touched: the steps before the last that has not begun, for its
        copies are not made; or all."""
        while self._futures and (all_steps or self.rank.runner.has_step_to_begin):
            self._finish_oldest()

    @property
    def eager_steps(self) -> Counter[EagerReason]:
        return self.rank.runner.eager_steps

    @property
    def failed_captures(self) -> int:
        return self.rank.runner.failed_captures

    def capture_usual_steps(self, progress: ProgressCallback) -> None:
        share = 0.0
        while share < 1.0 and self.rank.runner.all_graphs:
            share = self.rank.runner.capture_next_usual()
            progress("graphs", share)

    def use_idle_time(self) -> None:
        self.rank.runner.capture_one()

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """See `Executor.watch`: there is nothing to watch."""

    def close(self) -> None:
        for future in self._futures:
            future.error = CancelledError()
        self._futures.clear()
        if self._images is not None:
            self._images.close()
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._threads_before is not None:  # a setting of the caller's thread, also where loading failed
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _finish_oldest(self) -> None:
        future = self._futures.popleft()
        try:
            future.step_result = self.rank.runner.finish_step()
        except Exception as error:
            future.error = error

    @property
    def rank(self) -> LoadedRank:
        if self._rank is None:
            raise RuntimeError("the executor is not loaded")
        return self._rank


class _InlineFuture:
    """A step's result, computed at the latest when it is asked for."""

    def __init__(self, finish_oldest: Callable[[], None]) -> None:
        self._finish_oldest = finish_oldest
        self.step_result: StepResult | None = None
        self.error: BaseException | None = None

    def result(self, timeout: float | None = None) -> StepResult:
        """See `StepFuture.result`; the caller computes, however long it takes."""
        while self.error is None and self.step_result is None:
            self._finish_oldest()
        if self.error is not None:
            raise self.error
        assert self.step_result is not None
        return self.step_result
