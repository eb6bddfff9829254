"""Engine cores and encoders of these tests are copies of a process that has imported them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def processes(copied_children: None) -> None:
    """See `copied_children`."""
