"""What the installed torch was built for, without importing it: that takes seconds, and memory for good."""

import re
from importlib.util import find_spec
from pathlib import Path

_CUDA = re.compile(r"^cuda\b[^=\n]*= *'", re.MULTILINE)


def torch_has_cuda() -> bool:
    """As `torch.version.cuda` says. False where there is no torch."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and _CUDA.search(version.read_text(encoding="utf-8")) is not None
