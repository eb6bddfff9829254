"""Models in processes of their own."""

import pytest

from tests.e2e.server_template import stub_template


@pytest.fixture(scope="module", autouse=True)
def processes(copied_children: None) -> None:
    """They are copies of one that has imported numpy, which is there before a test looks at its own descriptors."""
    stub_template()
