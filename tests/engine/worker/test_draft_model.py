"""What a draft model asks the device for, and which blocks are computed for it, around a model that counts upwards."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.gpu.graph_buckets import GraphKey
from charonia.engine.gpu.graphs import StaticStep
from charonia.engine.layers.step_context import StepContext
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.draft_model import DraftLimits, DraftModel
from charonia.engine.worker.row_states import RowStates
from charonia.scheduler.drafts.proposals import Proposals
from charonia.scheduler.plan import NO_HOST_COPIES, NewSequence, StepPlan, StepResult

BLOCK, KNOWN = 4, 50
"""Tokens of a block, and those that the draft model knows; the target has twice as many."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Upwards:
    """A model and its attention: a token is followed by the next one. `passes`: the (row, start, count) of each.
    Tokens that it does not know it could not embed."""

    def __init__(self) -> None:
        self.passes: list[list[tuple[int, int, int]]] = []

    def begin_step(self, *_: object) -> None: ...

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> Iterator[Tensor]:
        batch: StepBatch = context.batch
        self.passes.append([*zip(*(each.tolist() for each in (batch.rows, batch.starts, batch.counts)), strict=True)])
        assert batch.tokens.max() < KNOWN
        tokens = batch.tokens.long() + 1
        return iter([torch.nn.functional.one_hot(tokens[at] % 100, 100).float() for at in selections])


class Drafting:
    """A worker's rows, the draft model beside them, and what it asked of the device in each step."""

    def __init__(self, blocks: int = 16) -> None:
        self.rows, self.model = RowStates(64, BLOCK, torch.device("cpu")), Upwards()
        self.draft = DraftModel(self.model, self.model, self.rows, DraftLimits(64, KNOWN))  # type: ignore[arg-type]
        self.draft.forget(blocks)
        self.asked: list[Sequence[tuple[int, int, int]]] = []
        read = self.rows.tokens_between
        self.rows.tokens_between = lambda spans: (self.asked.append(spans), read(spans))[1]  # type: ignore[method-assign]

    def step(
        self,
        computed: dict[int, tuple[int, int]],
        sampled: dict[int, Sequence[int]],
        new: Mapping[int, tuple[Sequence[int], Sequence[int]]] = MappingProxyType({}),
        shared: int = 0,
        block_copies: np.ndarray = NO_HOST_COPIES,
    ) -> Proposals:
        """Rows with the `computed` (start, count), which `sampled` tokens; `new`: their tokens and blocks, of which
        they have `shared` tokens computed. Two tokens are to be proposed for each."""
        rows = ints(*computed)
        starts, counts = (ints(*(value[at] for value in computed.values())) for at in (0, 1))
        fresh = tuple(NewSequence(row, ints(*tokens), shared, ResolvedSampling()) for row, (tokens, _) in new.items())
        pairs = [(row, block) for row, (_, blocks) in new.items() for block in blocks]
        appended = np.array(pairs, np.int32).reshape(-1, 2)
        samples = np.array([row in sampled for row in computed])
        plan = StepPlan(0, rows, starts, counts, samples, samples.astype(np.int32), appended, fresh, ints())
        plan = plan._replace(proposals=np.full(len(rows), 2, np.int32), block_copies=block_copies)
        self.rows.apply_plan(plan)
        self.draft.apply_plan(plan)
        offsets = {row: sum(computed[row]) for row in sampled}
        for row, tokens in sampled.items():
            places = np.arange(offsets[row], offsets[row] + len(tokens))
            self.rows.store_tokens(np.full(len(tokens), row), places, torch.tensor(tokens))
        lengths = [len(tokens) for tokens in sampled.values()]
        came = [token for tokens in sampled.values() for token in tokens]
        return self.draft.propose(
            plan, StepResult(0, ints(*sampled), ints(*offsets.values()), ints(*lengths), ints(*came))
        )


def test_the_device_is_asked_once_a_step_and_only_for_what_the_host_has_not() -> None:
    drafting = Drafting()
    new = {0: ([1, 2, 3], [0]), 1: ([7, 8, 60, 9], [1, 2]), 2: ([4, 5, 6, 7], [3, 4])}
    found = drafting.step({0: (0, 3), 1: (0, 4), 2: (0, 4)}, {0: [4], 1: [70], 2: [8]}, new)
    assert (found.rows.tolist(), found.tokens.tolist()) == ([0, 2], [5, 6, 9, 10]), (
        "row 1 has a token that it knows not"
    )
    assert drafting.asked == [[(0, 0, 3), (1, 0, 4), (2, 0, 4)]]
    found = drafting.step({0: (3, 1), 1: (4, 1), 2: (4, 1)}, {0: [5, 30], 1: [10], 2: [11]})
    assert found.tokens.tolist() == [31, 32, 12, 13]
    assert drafting.asked[1:] == [[]]
    # The token 5 was its own proposal: behind it alone is something to compute.
    assert drafting.model.passes[2] == [(0, 5, 1), (2, 5, 1)]
    drafting.rows.store_tokens(ints(0, 0, 0), ints(6, 7, 8), torch.tensor([31, 32, 43]))  # by steps without proposals
    found = drafting.step({0: (8, 1)}, {0: [44]})
    assert found.tokens.tolist() == [45, 46]
    assert drafting.asked[2:] == [[(0, 6, 9)]]


def test_padded_places_of_a_recorded_pass_have_tokens_that_it_knows() -> None:
    drafting = Drafting()
    drafting.step({0: (0, 2)}, {0: [70]}, {0: ([60, 9], [0])})
    assert not drafting.model.passes
    numbers = torch.zeros(5, 2, dtype=torch.int32)  # two places of nobody, which read row 0
    step = StaticStep(numbers, GraphKey(64, adapted=False, most=1, places=2))
    assert drafting.draft.compute_static(step)[0].shape == (2, 100)


def test_what_comes_back_from_the_host_is_computed_if_it_was_when_it_left() -> None:
    for proposals in (True, False):
        drafting = Drafting()
        tokens = [1, 2, 3, 4, 5]
        if proposals:
            drafting.step({0: (0, 5)}, {0: [6]}, {0: (tokens, [0, 1])})
        drafting.draft._full[2] = True  # of another content
        away, back = [0, 7, False], [2, 7, True]
        block_copies = np.array([away, back], np.int32)
        drafting.step({1: (4, 1)}, {1: [6]}, {1: (tokens, [2, 3])}, shared=4, block_copies=block_copies)
        assert drafting.model.passes[-2] == [(1, 4, 2) if proposals else (1, 0, 6)]
