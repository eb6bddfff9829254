"""The interface of what drafts beside the target: a draft model (`draft_model.py`), which goes through the same tokens,
or a head (`head_drafter.py`), which goes on from the target's hidden states. Both have a cache of the target's blocks,
and say ahead of the next step how its rows may go on."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from ...scheduler.drafts.proposals import Proposals
from ...scheduler.plan import IntArray, StepPlan, StepResult
from ..attention.backend import AttentionBackend
from ..cpu.program import StepRun
from ..gpu.graphs import StepGraphs
from ..models.draft_head import DraftHead
from ..models.interfaces import Decoder
from ..step_batch import HostCopy, SamplingArray
from .row_states import RowStates
from .sampler import choose_sampler


class StepDrafter(ABC):
    """A model that proposes tokens beside the target's steps, on the target's thread. Tokens and block tables are the
    target's `rows`, and `attention` has a cache of the target's blocks. With `draws` it chooses tokens as the rows'
    samplers would, with the same random numbers, else the likeliest ones."""

    def __init__(self, model: Decoder | DraftHead, attention: AttentionBackend, rows: RowStates, draws: bool) -> None:
        self.model = model
        self.attention = attention
        self._rows = rows
        self._draws = draws
        self.graphs: StepGraphs | None = None
        """Recorded passes, where there are some."""
        self._sample = choose_sampler(rows.device)

    @abstractmethod
    def forget(self, blocks: int) -> None:
        """Begin anew: `attention` has a cache of `blocks` blocks, all empty."""

    @abstractmethod
    def apply_plan(self, plan: StepPlan) -> None:
        """Called for every plan when its rows are entered."""

    def follow_copies(self, copies: IntArray) -> None:
        """Called for copies of blocks, see `StepPlan.block_copies`, that no plan has."""
        del copies

    @abstractmethod
    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """Propose as `plan` says, before the next step begins: the target's has `result`."""

    def _sampling(self, rows: IntArray, positions: IntArray) -> SamplingArray | None:
        return self._rows.sampling_at(rows, positions) if self._draws else None


class DraftPass(NamedTuple):
    """A pass of a drafter, which may be computed already, and the tokens that it chooses, on their way."""

    run: StepRun | None
    tokens: IntArray | HostCopy

    def finish(self) -> None:
        """Return when it is computed, or queued on a device."""
        if self.run is not None:
            self.run.finish()

    def read(self) -> IntArray:
        """The tokens int32 [S], when it is computed."""
        self.finish()
        return self.tokens.read() if isinstance(self.tokens, HostCopy) else self.tokens
