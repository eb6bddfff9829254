"""The process of an engine core, started before the server knows that it will need one.

Half of a server's start is the core's import of torch, and the other half, until the core is told what to load, is the
server's own imports: so they go on side by side. Imports nothing that takes long.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.gguf_files import GGUF_SUFFIX
from ...processes.child_process import prepare_child, prepared_children

CORE_NAME = "charonia-core"
"""The name of the process."""

_PREFIX = "CHARONIA_"
_PROCESS = f"{__package__}.process"
_OTHERWISE = (
    *("-h", "--help", "--config", "--backend", "--download-dir", "--executor", "--distributed-executor-backend"),
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
)
"""Flags of a server that needs no such process, or one with another environment."""


def prepare_core(arguments: Sequence[str]) -> None:
    """Start a core if `arguments`, a command line, will probably serve a checkpoint that is computed in one process by
    our own engine. It takes the first load; if there is none it must be dropped: `drop_prepared_children`."""
    match arguments:
        case ["serve", model, *flags] if not model.startswith("-"):
            named = {flag.partition("=")[0].replace("_", "-") for flag in flags} | set(_flags_of_environment())
            if _may_be_checkpoint(Path(model)) and named.isdisjoint(_OTHERWISE):
                prepare_child(CORE_NAME, _PROCESS, "import_libraries")


def _flags_of_environment() -> Iterator[str]:
    """The flags that variables set, as cli/flag_sources.py has them."""
    return (f"--{name[len(_PREFIX) :].lower().replace('_', '-')}" for name in os.environ if name.startswith(_PREFIX))


SPARE_CORE_BYTES = 300 * 2**20
"""Of memory, at most, that a core which waits has for itself."""


def keep_spare_cores(count: int) -> None:
    """Have so many cores wait for models that will be loaded, each with its libraries imported and no weights."""
    for _ in range(prepared_children(CORE_NAME), count):
        prepare_child(CORE_NAME, _PROCESS, "import_libraries")


def _may_be_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file() or any(path.glob(f"*{GGUF_SUFFIX}"))
    return path.suffix == GGUF_SUFFIX or not path.exists()
