"""Instances in processes of their own."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def processes(copied_children: None) -> None:
    """They are copies of one that has imported what servers are made of."""
