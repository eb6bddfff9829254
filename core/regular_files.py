"""Opens files of models only if they are regular.

Opening a pipe waits for its writer, and a device may never end; a library that does so may hold the GIL and stop the
whole process.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

from .errors import InvalidArgument

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def refuse_special_file(path: Path) -> None:
    """Raises `InvalidArgument` for a pipe, a socket, a device, or a link to one. A missing file passes."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # a name that no file can have
        return
    _refuse_kind(path, mode)


def refuse_special_files(directory: Path) -> None:
    """As `refuse_special_file`, for all files below a directory; links to directories are not followed."""
    for parent, _, names in os.walk(directory):
        for name in names:
            refuse_special_file(Path(parent, name))


def _refuse_kind(path: Path, mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise InvalidArgument(f"{path} is {kind}, and no regular file")


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, without waiting. Raises `InvalidArgument` as `refuse_special_file` does, and
    `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """The content of a file. Raises as `open_regular`, and `InvalidArgument` for more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise InvalidArgument(f"{path} has {size} bytes, and may have {most} at most")
        return file.read(most)


MAX_TEXT_BYTES = 1 << 23
"""The largest text file that describes a model."""


def file_within(directory: Path, name: object) -> Path:
    """The path of a file that another file in `directory` names. Raises `InvalidArgument` for a name that is no text or
    leads out of the directory."""
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidArgument(f"{directory}: {str(name)[:256]!r} is not the name of a file in it")
    return directory / name


def read_text(path: Path) -> str:
    """The text of a file, in UTF-8. Raises as `read_regular`, and `UnicodeDecodeError`."""
    return read_regular(path, MAX_TEXT_BYTES).decode()


_PIECE = 1 << 20
"""Bytes that are searched at a time, since no other thread runs meanwhile."""


def count_bytes(content: bytes, pattern: bytes) -> int:
    """How often a short pattern occurs, except across two pieces. Other threads run meanwhile."""
    return sum(content.count(pattern, at, at + _PIECE) for at in range(0, len(content), _PIECE))
