"""What counts as growth, and what as noise."""

from random import Random

import pytest

from .process_stats import trend

AT = range(60)
MIB = 1 << 20


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_leak_is_seen_through_noise(noise: float) -> None:
    random = Random(1)
    seen = trend(AT, [(100 + 0.1 * at + random.gauss(0, noise)) * MIB for at in AT])
    assert not seen.flat
    assert seen.slope == pytest.approx(0.1 * MIB, rel=0.2)


def test_what_stays_is_flat_though_it_began_with_a_climb() -> None:
    climb = [40.0 + 3 * at for at in range(20)]
    assert trend(AT, [*climb, *[100.0] * 40]).flat
    assert trend(AT, [*climb, *(100 + at % 2 for at in range(40))]).flat


def test_what_shrinks_is_flat() -> None:
    assert trend(AT, [100.0 - at for at in AT]).flat
