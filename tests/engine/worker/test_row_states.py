"""The rows an executor keeps, against the same told with lists."""

import weakref

import numpy as np
import torch

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.step_adapters import RankAdapter
from charonia.engine.worker.row_states import RowStates
from charonia.scheduler.plan import NewSequence, StepPlan


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def pairs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, dtype=np.int32).reshape(-1, 2)


def plan(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, **changes: object) -> StepPlan:
    samples = np.ones(len(rows), dtype=np.bool_)
    return StepPlan(0, rows, starts, counts, samples, samples.astype(np.int32), pairs(), (), ints())._replace(**changes)


def new(row: int, tokens: np.ndarray, computed: int = 0, **sampling: object) -> NewSequence:
    return NewSequence(row, tokens, computed, ResolvedSampling(**sampling))


def test_a_step_is_gathered_from_rows_in_plan_order() -> None:
    rows = RowStates(32, 4, torch.device("cpu"))
    step = plan(
        ints(5, 2),
        ints(0, 4),
        ints(3, 2),
        new=(new(2, ints(1, 2, 3, 4, 5, 6), 4, seed=2**64 - 1), new(5, ints(7, 8, 9), temperature=0.5, top_k=-1)),
        appended=pairs((2, 10), (5, 11), (2, 12)),
    )
    rows.apply_plan(step)
    inputs = rows.gather_inputs(step)
    assert inputs.batch.tokens.tolist() == [7, 8, 9, 5, 6]
    assert inputs.batch.positions.tolist() == [0, 1, 2, 4, 5]
    assert inputs.batch.owners.tolist() == [0, 0, 0, 1, 1]
    assert inputs.batch.tables[1].tolist() == [10, 12]
    assert inputs.batch.slots().tolist() == [44, 45, 46, 48, 49]
    assert inputs.logits_indices.tolist() == [2, 4]
    assert inputs.sampling["position"].tolist() == [3, 6]
    assert inputs.sampling["seed"].tolist() == [0, -1]
    assert inputs.sampling["temperature"].tolist() == [0.5, 0]
    assert inputs.sampling["top_k"].tolist() == [0, 0]


def test_a_sampled_token_is_there_for_the_next_step() -> None:
    rows = RowStates(8, 4, torch.device("cpu"))
    first = plan(ints(0), ints(0), ints(2), new=(new(0, ints(3, 4)),), appended=pairs((0, 1)))
    rows.apply_plan(first)
    rows.store_tokens(ints(0), ints(2), torch.tensor([99]))
    second = plan(ints(0), ints(2), ints(1))
    rows.apply_plan(second)
    assert rows.gather_inputs(second).batch.tokens.tolist() == [99]


def test_tokens_chosen_elsewhere_are_learnt() -> None:
    """Rows as the last stage has them, in any order."""
    rows = RowStates(8, 4, torch.device("cpu"))
    first = plan(
        ints(0, 3), ints(0, 0), ints(2, 1), new=(new(0, ints(3, 4)), new(3, ints(5))), appended=pairs((0, 1), (3, 2))
    )
    rows.apply_plan(first)
    rows.store_tokens(ints(3, 0), ints(1, 2), torch.tensor([77, 99]))
    second = plan(ints(0, 3), ints(2, 1), ints(1, 1))
    rows.apply_plan(second)
    assert rows.gather_inputs(second).batch.tokens.tolist() == [99, 77]


def test_only_rows_that_sample_are_asked_to() -> None:
    rows = RowStates(8, 4, torch.device("cpu"))
    step = plan(
        ints(0, 1),
        ints(0, 0),
        ints(1, 2),
        new=(new(0, ints(3, 4)), new(1, ints(5, 6))),
        appended=pairs((0, 1), (1, 2)),
        samples=np.array([False, True]),
    )
    rows.apply_plan(step)
    assert rows.gather_inputs(step).rows.tolist() == [1]
    assert rows.gather_inputs(step).logits_indices.tolist() == [2]


def test_a_row_taken_over_begins_a_table_of_its_own() -> None:
    rows = RowStates(8, 2, torch.device("cpu"))
    rows.apply_plan(plan(ints(0), ints(0), ints(3), new=(new(0, ints(1, 2, 3)),), appended=pairs((0, 5), (0, 6))))
    step = plan(ints(0), ints(0), ints(2), closed=ints(0), new=(new(0, ints(8, 9)),), appended=pairs((0, 7)))
    rows.apply_plan(step)
    inputs = rows.gather_inputs(step)
    assert inputs.batch.tokens.tolist() == [8, 9]
    assert inputs.batch.tables.tolist() == [[7]]


def test_an_adapter_that_is_unloaded_is_nobodys_when_its_sequences_have_ended() -> None:
    """Before a plan says so: none comes while nothing runs."""
    held = {"a": RankAdapter("a", 1, []), "b": RankAdapter("b", 1, [])}
    rows = RowStates(32, 4, torch.device("cpu"), held)
    sequences = (new(0, ints(1, 2))._replace(adapter="a"), new(1, ints(3))._replace(adapter="b"))
    rows.apply_plan(plan(ints(0, 1), ints(0, 0), ints(2, 1), new=sequences, appended=pairs((0, 1), (1, 2))))
    gone, stays = (weakref.ref(value) for value in held.values())
    rows.forget_adapter(held["a"])
    held.clear()
    assert gone() is None
    assert stays() is not None


def test_rows_grow_and_keep_what_they_hold() -> None:
    rows = RowStates(8, 4, torch.device("cpu"))
    rows.apply_plan(
        plan(ints(0), ints(0), ints(1), new=(new(0, ints(42), seed=7, temperature=0.5),), appended=pairs((0, 3)))
    )
    rows.apply_plan(plan(ints(300), ints(0), ints(1), new=(new(300, ints(43)),), appended=pairs((300, 4))))
    inputs = rows.gather_inputs(plan(ints(300, 0), ints(0, 0), ints(1, 1)))
    assert inputs.batch.tokens.tolist() == [43, 42]
    assert inputs.batch.tables.tolist() == [[4], [3]]
    assert inputs.sampling["seed"].tolist() == [0, 7]
