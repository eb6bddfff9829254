"""The memory of the slots for states."""

import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from charonia.engine.checkpoint.recurrence import LayerState
from charonia.engine.layers.recurrent_state import LayerSlots, StateSlots
from charonia.engine.step_batch import StepBatch
from charonia.scheduler.plan import NewSequence


class Unlisted(np.ndarray[Any, Any]):
    """Numbers of rows that no table is made of."""

    def tolist(self) -> Any:
        raise AssertionError("a table of a step's rows is made")


def test_a_step_without_new_rows_and_saves_makes_no_table_of_its_rows() -> None:
    """Nearly all steps are such."""
    batch = SimpleNamespace(
        rows=np.array([2, 0], np.int32).view(Unlisted), starts=np.array([5, 0]), token_ids=torch.zeros(2)
    )
    slots = StateSlots([LayerState(8, 3)], 3, torch.float32, torch.device("cpu"))
    slots.allocate(2)
    new = [NewSequence(row=0, tokens=np.zeros(4, np.int32), computed=0, sampling=cast(Any, None))]
    states = slots.begin_step(cast(StepBatch, batch), new)
    assert states.read(slots.layers[0].windows).shape == (2, 3, 8)
    with pytest.raises(AssertionError, match="a table"):
        slots.begin_step(cast(StepBatch, batch), new, saves=np.array([[2, 6, 1]], np.int32))


def test_earlier_slots_are_freed_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else both would have to fit into memory at once."""
    state = LayerState(window=3, channels=8, heads=2, rows=4, columns=4)
    slots = StateSlots([state, None, state], 2, torch.float32, torch.device("cpu"))
    slots.allocate(1)
    earlier = [weakref.ref(tensor) for layer in slots.layers for tensor in layer]
    allocate_layer = StateSlots._allocate_layer

    def watched(self: StateSlots, count: int, layer: LayerState) -> LayerSlots:
        assert not any(tensor() is not None for tensor in earlier)
        return allocate_layer(self, count, layer)

    monkeypatch.setattr(StateSlots, "_allocate_layer", watched)
    slots.allocate(4)
    assert [layer.windows.shape[0] for layer in slots.layers] == [6, 6]
