"""What a step costs beside the model: the parts are parts of the whole, and the loop ends."""

import pytest

from charonia.bench.step_overhead import PARTS, StepCase, measure


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_has_its_parts(ahead: int) -> None:
    found = measure(StepCase(sequences=3, ahead=ahead, steps=20, megabytes=1), parted=True)
    assert found.keys() == {"step", *PARTS}
    assert all(0 < found[part] < found["step"] for part in PARTS)
