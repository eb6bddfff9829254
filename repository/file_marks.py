"""The marks of files: a digest of their names, sizes and times, which another one tells a change by."""

import os
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

_MOST_FILES = 10_000
"""The files of a directory whose sizes and times are looked at. Of a folder that would be more than these only the
names are: an environment of Python may have fifty thousand, and polling looks at them again and again."""

_MOST_FOLDERS = 10_000
"""The folders that are looked into: a link may lead to a disk of data."""

_BYTECODE = "__pycache__"
"""Python writes it beside what it imports, so each load would be a change."""

EntryMarks: TypeAlias = tuple[tuple[str, bytes], ...]


class SourceMark(NamedTuple):
    """The mark of a version: of all that it is made from."""

    place: str
    config: str
    files: bytes
    beside: EntryMarks
    """Of what lies beside the versions."""

    unique: object = None
    """An object of its own for a mark that equals no other."""


def changed_entries(before: EntryMarks, after: EntryMarks) -> frozenset[str]:
    """The names of entries that came, went or changed."""
    return frozenset(name for name, _ in set(before) ^ set(after))


def files_mark(directory: Path) -> bytes:
    """The mark of everything in a directory; links are followed, and each folder is looked at once. Raises `OSError` if
    the directory cannot be read; what cannot be read in it is left out."""
    digest = blake2b(digest_size=16)
    for described in _walk(directory, ()):
        digest.update(repr(described).encode())
    return digest.digest()


def entry_marks(directory: Path, skipped: Collection[str]) -> EntryMarks:
    """The marks of a directory's entries by their names, but for those `skipped`. Raises as `files_mark` does."""
    digests = defaultdict[str, Any](lambda: blake2b(digest_size=16))
    for described in _walk(directory, skipped):
        folder, name, _ = described
        digests[folder.partition(os.sep)[0] or name].update(repr(described).encode())
    return tuple((name, digests[name].digest()) for name in sorted(digests))


def _walk(directory: Path, skipped: Collection[str]) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """The folder, the name and the stamp of each file."""
    looked_at = 0
    entered = set[tuple[int, int]]()
    left = deque([""])  # those near the root are looked at first
    while left and len(entered) < _MOST_FOLDERS:
        folder = left.popleft()
        try:
            status = os.stat(directory / folder)
            identity = status.st_dev, status.st_ino
            entries = [] if identity in entered else _entries(directory / folder)
        except OSError:
            if not folder:
                raise
            continue
        entered.add(identity)
        entries = [entry for entry in entries if folder or entry.name not in skipped]
        left += [os.path.join(folder, entry.name) for entry in entries if _is_folder(entry)]
        files = [entry for entry in entries if _is_file(entry)]
        few = looked_at + len(files) <= _MOST_FILES
        looked_at += len(files) if few else 0
        for entry in files:
            yield folder, entry.name, _stamp(entry) if few else None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.name != _BYTECODE), key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    try:
        status = entry.stat()
    except OSError:  # it has just gone
        return None
    return status.st_mtime_ns, status.st_size
