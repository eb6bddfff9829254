"""Which recurrences the C kernels compute."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from charonia.engine.cpu import library
from charonia.engine.cpu.recurrent import MAX_KEY_SIZE, RecurrenceShape, ScanSteps
from charonia.engine.layers.recurrence import DeltaRuleGates, StateRecurrence, build_delta_rule, build_selective_scan


@pytest.mark.skipif(library.level() is None, reason="no C extension")
@pytest.mark.parametrize("scans", [False, True])
def test_keys_that_kernels_have_no_room_for_are_torchs(scans: bool) -> None:
    loader = cast(Any, SimpleNamespace(dtype=torch.float32, device=torch.device("cpu")))
    heads = torch.ones(2)

    def built(key_size: int) -> StateRecurrence:
        shape = RecurrenceShape(2, 2, key_size, 8, 0, 2 * key_size, 4 * key_size)
        if scans:
            return build_selective_scan(loader, 0, shape, 0, ScanSteps(-heads, heads, None))
        return build_delta_rule(loader, 0, shape, DeltaRuleGates(-heads, heads, 0, 2))

    assert built(MAX_KEY_SIZE).untraceable is None
    assert built(MAX_KEY_SIZE + 1).untraceable is not None
