"""Directories that are kept from one run to the next, and that decide what is served."""

import os
import stat
from pathlib import Path

from ..core.errors import InvalidArgument


def make_private_directory(directory: Path, field: str) -> None:
    """Make a directory for this user alone, if it is not there; `field` is the setting that names it.

    Raises:
        InvalidArgument: it can't be made, or somebody else may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise InvalidArgument(f"{field}: {error}", field=field) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        message = f"{field}: {directory} must belong to the server's user, and nobody else may write to it"
        raise InvalidArgument(message, field=field)
