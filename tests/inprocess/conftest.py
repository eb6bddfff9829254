"""Engine cores and encoders of these tests are copies of a process that has imported them."""

from pathlib import Path

import pytest

from charonia.bench.load.fake_model import write_words


@pytest.fixture(scope="module", autouse=True)
def processes(copied_children: None) -> None:
    """See `copied_children`."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("checkpoint") / "words"
    write_words(directory)
    return directory
