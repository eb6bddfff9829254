"""What changes the mark of a directory's files, and what does not."""

import os
from pathlib import Path

import pytest

from charonia.repository import file_marks
from charonia.repository.file_marks import files_mark


def test_links_are_followed_once(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "m", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    (directory / "helpers").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(directory)
    (directory / "itself").symlink_to("itself")
    (directory / "nowhere").symlink_to("gone")
    os.mkfifo(directory / "pipe")
    before = files_mark(directory)
    assert files_mark(directory) == before
    (elsewhere / "code.py").write_text("1")
    assert files_mark(directory) != before


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        files_mark(tmp_path / "gone")
    before = files_mark(tmp_path)
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "locked":
            raise PermissionError
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert files_mark(tmp_path) == before


def test_of_many_files_the_names_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies near the root is looked at first."""
    monkeypatch.setattr(file_marks, "_MOST_FILES", 3)
    (tmp_path / "environment" / "site-packages").mkdir(parents=True)
    (tmp_path / "utils").mkdir()
    packages = [tmp_path / "environment" / "site-packages" / name for name in "abc"]
    for file in (*packages, tmp_path / "utils" / "code.py"):
        file.write_text("1")
    before = files_mark(tmp_path)
    packages[0].write_text("12")
    assert files_mark(tmp_path) == before
    packages[0].rename(packages[0].with_name("d"))
    renamed = files_mark(tmp_path)
    assert renamed != before
    (tmp_path / "utils" / "code.py").write_text("12")
    assert files_mark(tmp_path) != renamed
    monkeypatch.setattr(file_marks, "_MOST_FOLDERS", 1)
    top = files_mark(tmp_path)
    (tmp_path / "utils" / "more.py").write_text("1")
    assert files_mark(tmp_path) == top
