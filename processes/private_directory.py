"""Directories that outlive a run and decide what is served, and small files in them."""

import os
import secrets
import stat
from pathlib import Path

from ..core.errors import InvalidArgument

PART_SUFFIX = ".part"
"""The suffix of files that are not whole."""


def make_private_directory(directory: Path, field: str) -> None:
    """Make a directory for this user alone unless it exists; `field` is the setting that names it.

    Raises:
        InvalidArgument: it can't be made, or somebody else may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise InvalidArgument(f"{field}: {error}", field=field) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        message = f"{field}: {directory} must belong to the server's user, and nobody else may write to it"
        raise InvalidArgument(message, field=field)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically: either the old content or the new one survives. Raises `OSError`."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        aside.replace(path)
        sync_directory(path.parent)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
