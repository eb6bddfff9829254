"""Where the blocks of a prompt's prefix may come from but from computing it: a directory, another server. Requests wait
for them outside the queue, before the scheduler knows of them."""

from collections.abc import Collection, Mapping
from typing import Protocol

from ...scheduler.plan import StepUpdates
from .inbox import NewRequest
from .messages import RequestRejected


class PrefixOrigin(Protocol):
    """For the step loop's thread."""

    name: str
    """The field of `EngineTotals` that has its totals."""
    holds_blocks: bool
    """Whether it may hold blocks that no sequence has."""

    @property
    def waiting(self) -> int:
        """Sequences that wait for it."""

    @property
    def held_blocks(self) -> int:
        """Blocks that are held for other servers."""

    def take(self, new: NewRequest) -> bool:
        """Whether a new sequence waits for it; if so, `turn` returns it later, once. Raises `InvalidArgument` if it can
        never run."""

    def patience(self) -> float:
        """Seconds after which `turn` is to be called, whatever comes."""

    def turn(self) -> Collection[NewRequest | RequestRejected]:
        """What is due before a plan is made; sequences that wait no more, and those that are refused."""

    def on_updates(self, updates: StepUpdates) -> None:
        """A step's result has been applied, and no plan was made since."""

    def discard(self, keys: Collection[int]) -> None:
        """These sequences have ended: nothing waits for them any more."""

    def make_room(self) -> bool:
        """Give up blocks that no sequence has, because none can run. False: there are none."""

    def totals(self) -> Mapping[str, float]:
        """What was done since the start, by name."""

    def check_integrity(self) -> None:
        """Raises `AssertionError` where something is lost."""

    def close(self) -> None: ...
