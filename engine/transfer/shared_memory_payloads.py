"""Payloads in memory that two servers on one host map: the decoder makes a file of it, and the prefiller, who finds the
decoder's secret in it, writes there. A server elsewhere finds no such file, and payloads come over the connection."""

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .wire import Link, Piece, TransferError

_DIRECTORY = Path("/dev/shm")
_PREFIX = "charonia-kv-"
SECRET_BYTES = 32


class SharedMemorySender:
    """A `PayloadSender` over a decoder's file."""

    name = "shared_memory"

    def __init__(self, link: Link, name: str, secret: bytes) -> None:
        """Raises `OSError` where there is no such file of this user's, or it is another's."""
        self._link = link
        if not name.startswith(_PREFIX) or "/" in name or len(secret) != SECRET_BYTES:
            raise FileNotFoundError(name)
        file = os.open(_DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise PermissionError(name)
            self._memory = mmap.mmap(file, 0)
        except ValueError as error:
            raise FileNotFoundError(name) from error
        finally:
            os.close(file)
        if self._memory[:SECRET_BYTES] != secret:
            self._memory.close()
            raise FileNotFoundError(name)

    def send(self, piece: Piece, parts: Sequence[bytes]) -> None:
        if sum(map(len, parts)) > len(self._memory):
            raise TransferError("garbage", "the decoder's memory is smaller than the piece that it wants")
        at = 0
        for part in parts:
            self._memory[at : at + len(part)] = part
            at += len(part)
        self._link.send(piece)

    def close(self) -> None:
        self._memory.close()


class SharedMemoryReceiver:
    """A `PayloadReceiver`, which makes the file."""

    def __init__(self, size: int) -> None:
        """Raises `OSError` where the host has no such memory, or too little."""
        self.name = _PREFIX + secrets.token_hex(16)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        file = os.open(_DIRECTORY / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, max(size, SECRET_BYTES))
            self._memory = mmap.mmap(file, 0)
            self._memory[:SECRET_BYTES] = self.secret
        except BaseException:
            self.forget_name()
            raise
        finally:
            os.close(file)

    def receive(self, size: int) -> memoryview:
        if size > len(self._memory):
            raise TransferError("garbage", "the prefiller tells of a piece that is larger than the memory for it")
        return memoryview(self._memory)[:size]

    def forget_name(self) -> None:
        """Nobody else needs to open it: what is mapped stays, and nothing is left if this process dies."""
        with suppress(FileNotFoundError):
            os.unlink(_DIRECTORY / self.name)

    def close(self) -> None:
        self.forget_name()
        with suppress(BufferError):  # a view of the last payload lives still: the memory goes with it
            self._memory.close()
