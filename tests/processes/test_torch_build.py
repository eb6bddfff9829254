"""What torch was built for, read without importing it."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from charonia.processes import host


def test_it_says_what_torch_itself_says() -> None:
    assert host.torch_has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\nhip = '6.1'\n", False),
        ("cuda = '11.8'\n", True),
        ("", False),
    ],
)
def test_the_version_file_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, has: bool) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host, "find_spec", lambda name: spec)
    assert host.torch_has_cuda() == has


def test_without_torch_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    assert not host.torch_has_cuda()
