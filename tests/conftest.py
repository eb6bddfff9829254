"""What every test may need."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Two shared cores: a deadline per example would test the neighbours.
settings.register_profile("charonia", deadline=None)
settings.load_profile("charonia")

# Nothing under test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent
