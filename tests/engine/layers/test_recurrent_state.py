"""The memory of the slots for states."""

import weakref

import pytest
import torch

from charonia.engine.checkpoint.recurrence import LayerState
from charonia.engine.layers.recurrent_state import LayerSlots, StateSlots


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
