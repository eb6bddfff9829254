"""When a rank's steps begin, and how often they are computed, around a decoder that only counts."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.engine.layers.step_context import StepContext
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.model_runner import ModelRunner
from charonia.engine.worker.row_states import RowStates
from charonia.scheduler.plan import IntArray, NewSequence, SamplerParams, StepPlan

CPU = torch.device("cpu")
NO_PAIRS = np.zeros((0, 2), np.int32)


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan(step: int, start: int, *, new: bool = False) -> StepPlan:
    """One more token of a sequence of three in row 0."""
    known = (NewSequence(0, ints(1, 2, 3), 0, SamplerParams()),) if new else ()
    appended = ints(0, 1).reshape(1, 2) if new else NO_PAIRS
    counts = ints(3 if new else 1)
    return StepPlan(step, ints(0), ints(start), counts, np.array([True]), ints(1), appended, known, ints())


class Counting:
    """A decoder and its attention: says what happens to them, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> None:
        """A stage that is not the last has none."""
        self.said.append("computed")

    def close(self) -> None: ...

    def allocate(self, blocks: int) -> None: ...


class Stage(Counting):
    """One that is not the last."""

    def begin_step(self, *_: object) -> None: ...


class Alone(Counting):
    """Computed beside the caller."""

    def begin_step(self, context: StepContext | StepBatch, *asked: object) -> "Alone":
        if asked:
            self.said.append("begun")
        return self

    def finish(self) -> None:
        self.said.append("finished")


def runner(model: Stage | Alone, device: torch.device = CPU) -> ModelRunner:
    return ModelRunner(model, model, RowStates(32, 4, CPU), device)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stage_that_is_not_the_last_sends_a_step_once(device: str) -> None:
    stage = Stage()
    result = runner(stage, torch.device(device)).run_step(plan(0, 0, new=True))
    assert stage.said == ["computed"]
    assert not len(result.rows)


def test_steps_begin_before_others_are_finished() -> None:
    model = Alone()
    steps = runner(model)
    steps.begin_step(plan(0, 0, new=True))
    steps.begin_step(plan(1, 3))
    assert model.said == ["begun", "begun"]
