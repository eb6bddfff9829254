"""What the C sources are, in a word: compiled into the library, and compared when it is opened. Standard library alone:
setuptools reads this file by its path."""

import hashlib
from pathlib import Path


def source_stamp(folder: Path) -> str:
    """A hash of the names and contents of all C sources of `folder`; "" where there are none, as in a wheel."""
    sources = sorted(path for path in folder.iterdir() if path.suffix in {".c", ".h", ".inc"})
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if sources else ""
