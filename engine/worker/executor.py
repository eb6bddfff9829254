"""The interface between the step loop and the executors, which compute steps."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from ...core.adapter import Adapter
from ...core.eager_reason import EagerReason
from ...core.errors import CharoniaError
from ...kvcache.layer_groups import ONE_GROUP, LayerGroups
from ...scheduler.plan import NO_HOST_COPIES, IntArray, MaskSource, StepPlan, StepResult
from ..checkpoint.encoder_shape import EncoderShape
from .image_files import ImageDirectorySettings, ImageMover

ProgressCallback = Callable[[str, float], None]
"""Called with (phase, fraction done from 0 to 1) while loading."""


class Capacity(NamedTuple):
    """An executor's findings when it has loaded its model."""

    vocab_size: int
    max_model_len: int
    block_bytes: int
    """Bytes one cache block takes, over all layers of a group."""
    free_bytes: int
    """Memory left for the cache on the tightest device."""
    machine: str = ""
    """The processor, and the speed it allows, for people."""
    ahead: int = 0
    """Steps that should be under way beside the one that is computed, unless somebody says otherwise."""
    state_bytes: int = 0
    """Bytes of one sequence's recurrent state, over all layers; 0 where every layer has a cache of tokens."""
    on_gpu: bool = False
    """Whether `free_bytes` are a GPU's."""
    groups: LayerGroups = ONE_GROUP
    """The groups of the layers that have a cache: each has blocks of its own for the same tokens."""
    latent: bool = False
    """Whether they keep latents (MLA) in place of keys and values."""
    splits: bool = True
    """Whether twice as many ranks of a tensor could share the model."""
    encoder: EncoderShape | None = None
    """What sequences attend to beside their tokens, if the model has an encoder."""
    cross_bytes: int = 0
    """Bytes of what all rows together may keep of it, which are not among `free_bytes`."""
    dtype: str = ""
    """What the model computes in, whatever the configuration leaves to the checkpoint; empty where it does not."""


class CachePlaces(NamedTuple):
    """Places of the cache: blocks, then snapshots of states."""

    blocks: Sequence[int] = ()
    states: Sequence[int] = ()


class CacheCopies(NamedTuple):
    """Copies between the cache and the host's memory, each [V, 3] as in a `StepPlan`."""

    blocks: IntArray = NO_HOST_COPIES
    states: IntArray = NO_HOST_COPIES


NO_COPIES = CacheCopies()


class ImageLayout(NamedTuple):
    """What the images of a rank's places are."""

    layout: str
    """Equal ones mean the same."""
    block_bytes: int
    state_bytes: int

    def bytes_of(self, places: CachePlaces) -> int:
        return len(places.blocks) * self.block_bytes + len(places.states) * self.state_bytes


class StepFuture(Protocol):
    """The result of a step to come; `concurrent.futures.Future[StepResult]` is one."""

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the result, `timeout` seconds at most.

        Raises:
            BaseException: the step's own error; CancelledError if the executor was closed before.
            TimeoutError: it takes longer.
        """


class Executor(Protocol):
    """Computes step plans, strictly in order. Calls may come before earlier results are there."""

    def load(self, progress: ProgressCallback) -> Capacity:
        """Load weights and report what is left for the cache."""

    def allocate(self, blocks: int, host_blocks: int = 0, snapshots: int = 0, host_snapshots: int = 0) -> None:
        """Allocate the cache: `blocks` blocks. Of recurrent states, if the model has any: one for each row, and
        `snapshots` beside them. Host memory for `host_blocks` and `host_snapshots` more, which plans move."""

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> StepFuture:
        """`masks` makes those of `plan.masked`: it is called once, on the caller's thread, now or when the result is
        asked for."""

    def load_adapter(self, path: str) -> Future[Adapter]:
        """Read an adapter's directory beside the steps, one adapter after the other. Its `name` is empty. The result is
        there when every rank computes plans that have its digest, or else raises the first one's `CharoniaError`. An
        adapter that is there already takes no memory."""

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter: no plan from now on has it, nor one without a result. None must be loading."""

    def open_directory(self, settings: ImageDirectorySettings) -> ImageMover:
        """Let every rank move images from and to a directory, until the executor is closed. Called once, when the cache
        is allocated."""

    @property
    def image_layouts(self) -> list[ImageLayout]:
        """By rank, what the images of blocks and snapshots are, once these are allocated: those of another layout mean
        nothing."""

    def take_places(self, places: CachePlaces) -> Callable[[], list[bytes]]:
        """Copy what these places have after all plans so far, for the caller's thread. What is returned may be called
        once, by any thread, for the bytes of each rank; it raises the `CharoniaError` of a lost one."""

    def put_places(self, places: CachePlaces, content: Sequence[memoryview], copies: CacheCopies = NO_COPIES) -> None:
        """After all plans so far make the `copies`, which may save what the places have; then let these, which no plan
        without a result computes, have this content of each rank. Its memory may change afterwards."""

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        """A GPU's steps that were launched kernel by kernel; see `EngineTotals.eager_steps`."""

    @property
    def failed_captures(self) -> int:
        """CUDA graphs that could not be captured; each is tried again later."""

    def capture_usual_steps(self, progress: ProgressCallback) -> None:
        """Record the steps that most requests need, where steps are recorded, before the first request. The
        phase is "graphs"; what fails, or is rare, is left to `use_idle_time`."""

    def use_idle_time(self) -> None:
        """Prepare a little of what later steps profit from: some tenths of a second at most. No step is under way."""

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """Call `tell`, from any thread, when the executor is lost between steps; at once if it is already. An executor
        that computes in this process is never lost."""

    def close(self) -> None:
        """Stop and free everything; pending futures are cancelled."""
