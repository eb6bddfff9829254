"""The process of an engine core, started before the server knows that it will need one: the core's import of torch and
the server's own imports take as long as each other, and run side by side. Imports nothing that takes long.
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
"""Flags of a server that needs no such process, or another environment for it."""


def prepare_core(arguments: Sequence[str]) -> None:
    """Start a core if `arguments`, a command line, will probably serve a checkpoint with one core of ours. The first
    load takes it; without one, `drop_prepared_children` must."""
    match arguments:
        case ["serve", model, *flags] if not model.startswith("-"):
            named = {flag.partition("=")[0].replace("_", "-") for flag in flags} | set(_flags_of_environment())
            if _may_be_checkpoint(Path(model)) and named.isdisjoint(_OTHERWISE):
                prepare_child(CORE_NAME, _PROCESS, "import_libraries")


def _flags_of_environment() -> Iterator[str]:
    """The flags that environment variables set, by the names in cli/flag_sources.py."""
    return (f"--{name[len(_PREFIX) :].lower().replace('_', '-')}" for name in os.environ if name.startswith(_PREFIX))


SPARE_CORE_BYTES = 300 * 2**20
"""Memory that a waiting core takes at most, beside what it shares."""


def keep_spare_cores(count: int) -> None:
    """Keep so many cores waiting for later loads, with their libraries imported and no weights."""
    for _ in range(prepared_children(CORE_NAME), count):
        prepare_child(CORE_NAME, _PROCESS, "import_libraries")


def _may_be_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file() or any(path.glob(f"*{GGUF_SUFFIX}"))
    return path.suffix == GGUF_SUFFIX or not path.exists()
