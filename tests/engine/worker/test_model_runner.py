"""When a rank's steps begin, and how often they are computed, around a decoder that only counts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.layers.step_context import StepContext
from charonia.engine.step_batch import SampledTokens, StepBatch
from charonia.engine.worker.cpu_step_computer import CpuStepComputer
from charonia.engine.worker.device_step_computer import DeviceStepComputer
from charonia.engine.worker.model_runner import ModelRunner
from charonia.engine.worker.row_states import RowStates
from charonia.scheduler.plan import IntArray, MaskArray, NewSequence, StepPlan

CPU = torch.device("cpu")
GREEDY = ResolvedSampling()
BANNED = ResolvedSampling(logits=LogitsParams(bad_words=((1,),)))
NO_PAIRS = np.zeros((0, 2), np.int32)


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan(step: int, start: int, *, new: bool = False, sampling: ResolvedSampling = GREEDY) -> StepPlan:
    """One more token of a sequence of three in row 0."""
    known = (NewSequence(0, ints(1, 2, 3), 0, sampling),) if new else ()
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


def runner(model: Alone, rows: RowStates | None = None) -> ModelRunner:
    """Of a CPU."""
    rows = rows or RowStates(32, 4, CPU)
    return ModelRunner(CpuStepComputer(model, model, rows), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("queued", [False, True])
def test_a_stage_that_is_not_the_last_sends_a_step_once(queued: bool) -> None:
    stage: Any = Stage()
    rows = RowStates(32, 4, CPU)
    computer = DeviceStepComputer(stage, stage, rows, CPU) if queued else CpuStepComputer(stage, stage, rows)
    result = ModelRunner(computer, rows).run_step(plan(0, 0, new=True))
    assert stage.said == ["computed"]
    assert not len(result.rows)


def test_steps_begin_before_others_are_finished() -> None:
    model = Alone()
    steps = runner(model)
    steps.begin_step(plan(0, 0, new=True))
    steps.begin_step(plan(1, 3))
    assert model.said == ["begun", "begun"]


class Kernels(Alone):
    """Computes beside the caller, and chooses token 1 at each place that it is told to."""

    logits = torch.tensor([[0.0, 1.0, 0.5]])

    def begin_step(self, context: StepContext | StepBatch, *asked: object) -> "Kernels":
        if asked:
            samples = asked[1]
            self.said.append("begun" if samples is None else "begun to sample")
            if isinstance(samples, SampledTokens):
                samples.tokens[:] = 1
        return self


@pytest.mark.parametrize(
    ("sampling", "token", "kernels"),
    [
        (ResolvedSampling(logprobs=1), 1, "begun to sample"),
        (BANNED, 2, "begun"),
    ],
)
def test_a_step_that_needs_the_host_is_followed_when_its_token_is_there(
    sampling: ResolvedSampling, token: int, kernels: str
) -> None:
    model, rows = Kernels(), RowStates(32, 4, CPU)
    steps = runner(model, rows)
    steps.begin_step(plan(0, 0, new=True, sampling=sampling))
    steps.begin_step(plan(1, 3))
    assert model.said == [kernels]
    first = steps.finish_step()
    assert model.said == [kernels, "finished", kernels]
    assert first.tokens.tolist() == [token]
    assert rows.gather_inputs(plan(1, 3)).batch.tokens.tolist() == [token]
    assert [logprob and logprob.ids for logprob in first.logprobs] == ([[1]] if sampling.logprobs else [])


def test_the_other_rows_of_a_step_are_sampled_by_kernels() -> None:
    rows = RowStates(32, 4, CPU)
    known = [NewSequence(row, ints(1, 2), 0, ResolvedSampling(), prompt=2) for row in range(3)]
    known[1] = known[1]._replace(sampling=ResolvedSampling(logits=LogitsParams(repetition_penalty=2.0)))
    known[2] = known[2]._replace(sampling=ResolvedSampling(0.5, seed=3, prompt_logprobs=0))
    appended, ones = np.array([[0, 0], [1, 1], [2, 2]], np.int32), ints(1, 1, 1)
    step = StepPlan(0, ints(0, 1, 2), 0 * ones, 2 * ones, ones == 1, ints(1, 1, 2), appended, tuple(known), ints())
    rows.apply_plan(step)
    inputs = rows.gather_inputs(step)
    assert inputs.logits_indices.tolist() == [1, 3, 4, 5]
    samples = inputs.samples()
    assert samples is not None
    assert samples.selected is not None
    assert samples.selected.tolist() == [0, 3]
    assert samples.sampling is not None
    assert samples.sampling["seed"].tolist() == [0, 3]
    assert inputs.scored is not None
    assert inputs.scored.among is not None
    assert (inputs.scored.among.tolist(), inputs.scored.tokens.tolist()) == ([2], [2])


class Waiting(Alone):
    """One whose steps wait for masks."""

    def provide_masks(self, masks: MaskArray | None) -> None:
        self.said.append("masks" if masks is not None else "no masks")


def masked(step: int, start: int, *, new: bool = False) -> StepPlan:
    return plan(step, start, new=new)._replace(masked=ints(0))


def test_masks_are_made_when_the_step_has_begun_and_before_it_is_waited_for() -> None:
    model = Waiting()
    steps = runner(model)

    def make() -> MaskArray:
        model.said.append("making")
        return np.zeros((1, 4), np.int32)

    steps.run_step(masked(0, 0, new=True), make)
    assert model.said == ["begun", "making", "masks", "finished"]


def test_a_step_does_not_begin_behind_one_that_waits_for_masks() -> None:
    model = Waiting()
    steps = runner(model)
    steps.begin_step(masked(0, 0, new=True), lambda: np.zeros((1, 4), np.int32))
    steps.begin_step(plan(1, 3))
    assert model.said == ["begun", "masks", "begun"]
    steps.finish_step()
    steps.finish_step()
    assert model.said == ["begun", "masks", "begun", "finished", "finished"]


def test_kernels_are_let_go_when_masks_fail_or_the_runner_closes() -> None:
    def fail() -> MaskArray:
        raise RuntimeError("no mask")

    model = Waiting()
    steps = runner(model)
    with pytest.raises(RuntimeError, match="no mask"):
        steps.run_step(masked(0, 0, new=True), fail)
    assert model.said == ["begun", "no masks"]
    steps.begin_step(masked(1, 3), fail)
    steps.close()
    assert model.said == ["begun", "no masks", "begun", "no masks"]


def test_masked_rows_without_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="needs masks"):
        runner(Waiting()).begin_step(masked(0, 0, new=True))


def test_tokens_that_were_given_are_computed_on() -> None:
    model = Waiting()
    steps = runner(model)
    steps.run_step(plan(0, 0, new=True))
    given = plan(1, 3)._replace(counts=ints(2), forced=ints(0, 4, 77).reshape(1, 3))
    steps.begin_step(given)
    (step,) = steps._steps
    assert step.inputs is not None
    assert step.inputs.batch.tokens.tolist()[1:] == [77]
