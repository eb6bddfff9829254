"""The Python that runs a model: the server's own, or that of an environment which EXECUTION_ENV_PATH names.

An environment is a directory with `bin/python`, such as a virtual environment, or an archive of one, such as conda-pack
makes; see https://github.com/triton-inference-server/python_backend#creating-custom-execution-environments.
"""

import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import InvalidArgument
from ...processes.scratch import ScratchDirectory
from .stub_process import SAME_INTERPRETER, Interpreter

ENVIRONMENT = "EXECUTION_ENV_PATH"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_UNPACK_SECONDS = 300.0


@dataclass(slots=True)
class _Unpacked:
    """An archive that was unpacked; `users` are the instances that run in it."""

    scratch: ScratchDirectory
    users: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: InvalidArgument | None = None


_unpacked: dict[Hashable, _Unpacked] = {}
_lock = threading.Lock()


@contextmanager
def interpreter(model_directory: Path, parameters: Mapping[str, str]) -> Iterator[Interpreter]:
    """The interpreter for a model, as long as the block lasts. Blocks while an archive is unpacked, once for all
    instances.

    Raises:
        InvalidArgument: there is no Python where the parameter says.
    """
    value = parameters.get(ENVIRONMENT, "")
    if not value:
        yield SAME_INTERPRETER
        return
    path = Path(value.replace(_MODEL_DIRECTORY, str(model_directory)))
    if path.is_dir():
        yield _interpreter_in(path)
        return
    if not path.is_file():
        raise _error(f"there is no '{path}'")
    with _unpack(path) as directory:
        yield _interpreter_in(directory)


def _interpreter_in(directory: Path) -> Interpreter:
    program = directory / "bin" / "python"
    if not program.exists():
        raise _error(f"'{directory}' has no bin/python")
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    libraries = [str(directory / "lib"), inherited["LD_LIBRARY_PATH"]] if "LD_LIBRARY_PATH" in inherited else []
    paths = {
        "PATH": os.pathsep.join([str(directory / "bin"), inherited.get("PATH", os.defpath)]),
        **({"LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else {}),
    }
    return Interpreter(str(program), {**inherited, **paths})


@contextmanager
def _unpack(archive: Path) -> Iterator[Path]:
    stamp = archive.stat()
    key = (str(archive.resolve()), stamp.st_mtime_ns, stamp.st_size)
    with _lock:
        first = key not in _unpacked
        entry = _unpacked.setdefault(key, _Unpacked(ScratchDirectory())) if first else _unpacked[key]
        entry.users += 1
    try:
        if first:
            _extract(archive, entry)
        entry.done.wait()
        if entry.error is not None:
            raise entry.error
        yield entry.scratch.path
    finally:
        with _lock:
            entry.users -= 1
            if not entry.users:
                del _unpacked[key]
                entry.scratch.close()


def _extract(archive: Path, entry: _Unpacked) -> None:
    try:
        shutil.unpack_archive(archive, entry.scratch.path)
        # What conda-pack makes knows the paths that it was packed with.
        fix_paths = entry.scratch.path / "bin" / "conda-unpack"
        if fix_paths.exists():
            subprocess.run([str(fix_paths)], check=True, capture_output=True, timeout=_UNPACK_SECONDS)
    except (OSError, ValueError, tarfile.TarError, shutil.ReadError, subprocess.SubprocessError) as error:
        entry.error = _error(f"'{archive}' cannot be unpacked: {error}")
    finally:
        entry.done.set()


def _error(message: str) -> InvalidArgument:
    return InvalidArgument(f"{ENVIRONMENT}: {message}", field=ENVIRONMENT)
