"""The directory of `--state-dir`: what requests changed, and the next server of the same directory goes on with."""

import fcntl
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.errors import DiskFull, Internal, InvalidArgument, is_disk_full
from ..processes.private_directory import PART_SUFFIX, make_private_directory, replace_file

_FLAG = "--state-dir"
_LOCK = ".lock"

Kept = TypeVar("Kept", bound=msgspec.Struct)


class StateDirectory:
    """Keeps structs by name, each in a file of JSON under a line with its checksum: whole or not at all, whatever ends
    the server. One server has it until `close`; `write` blocks, and belongs into a thread.

    Raises:
        InvalidArgument: it cannot be made, another server has it, or somebody else may write to it.
    """

    def __init__(self, path: Path) -> None:
        make_private_directory(path, _FLAG)
        self.path = path
        self._read: set[str] = set()
        try:
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"{_FLAG} {path} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise InvalidArgument(f"{_FLAG} {path} is another server's: each needs its own") from None
        for part in path.glob(f"*{PART_SUFFIX}"):
            with suppress(OSError):  # a folder of somebody else's
                part.unlink()

    def close(self) -> None:
        os.close(self._lock)

    def unread(self) -> list[str]:
        """The names of what is kept and was not read: an earlier server had what this one lacks."""
        return sorted(file.stem for file in self.path.glob("*.json") if file.stem not in self._read)

    def read(self, name: str, kind: type[Kept]) -> Kept | None:
        """What was written by that name; None if nothing was. Raises `InvalidArgument` for a file that is damaged."""
        self._read.add(name)
        file = self.path / f"{name}.json"
        try:
            checksum, _, content = file.read_bytes().partition(b"\n")
            if checksum.decode() != sha256(content).hexdigest():
                raise ValueError("its first line is not the checksum of the others")
            return msgspec.json.decode(content, type=kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise InvalidArgument(
                f"{file} is damaged: {error}. Put a whole copy in its place, or take it away to begin without it"
            ) from None

    def write(self, name: str, kept: msgspec.Struct) -> None:
        """Keep it in place of what was written by that name. Raises `Internal` if the disk refuses, `DiskFull` if it is
        that: nothing changed."""
        content = msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n"
        try:
            replace_file(self.path / f"{name}.json", sha256(content).hexdigest().encode() + b"\n" + content)
        except OSError as error:
            kind = DiskFull if is_disk_full(error) else Internal
            raise kind(f"{_FLAG} {self.path} cannot be written: {error.strerror}; nothing is changed") from None
