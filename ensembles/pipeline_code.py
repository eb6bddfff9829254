"""The code of a pipeline: the modules of one version's directory, apart from all others.

Each load makes modules anew, of the files as they are: a package whose name no other load has, and no bytecode is read
or left beside the sources. The package is gone when the version is unloaded.
"""

import ast
import inspect
import itertools
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.regular_files import MAX_TEXT_BYTES, read_regular
from ..telemetry.loop_lag import HOLDER
from .lookup import Lookup
from .named_tensors import NamedTensors

log = logging.getLogger(__name__)

ENTRY = "run"
"""The function of a pipeline that answers a request."""

_serial = itertools.count(1)


def _check_syntax(file: Path) -> None:
    """Raises `InvalidArgument`, naming file and line, if the file is no Python, or has no `run` that is async."""
    try:
        tree = ast.parse(read_regular(file, MAX_TEXT_BYTES), str(file))
    except OSError:
        raise InvalidArgument(f"there is no file '{file}'") from None
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument(_syntax_error(file, error)) from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == ENTRY:
            raise InvalidArgument(f"{file}:{node.lineno}: '{ENTRY}' must be async: write 'async def {ENTRY}'")
    names = {name for node in tree.body for name in _names_bound(node)}
    if not names & {ENTRY, "*"}:
        raise InvalidArgument(f"{file} defines no '{ENTRY}': write 'async def {ENTRY}(request, lookup)'")


def _syntax_error(file: Path, error: SyntaxError | ValueError) -> str:
    line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    return f"{file}{line}: {error.msg if isinstance(error, SyntaxError) else error}"


def _names_bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement may bind; those of blocks, such as `try`, included."""
    for part in ast.walk(node):
        if isinstance(part, ast.AsyncFunctionDef | ast.FunctionDef):
            yield part.name
        elif isinstance(part, ast.alias):
            yield part.asname or part.name
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id


class _SourceLoader(SourceFileLoader):
    """Compiles the source each time: bytecode is told apart by the second and the size alone, and a file that appears
    in a model's directory would be a change of the model."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class PipelineCode:
    """The modules of one version.

    Raises:
        InvalidArgument: there is no file, or it is no pipeline's; the message names file and line.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        filename = config.raw.get("default_model_filename") or "pipeline.py"
        self._file = directory.resolve() / filename
        self._root = directory.resolve().parents[1]
        self._owner = f"pipeline '{config.name}'"
        self._package = f"pipeline_{re.sub(r'[^0-9A-Za-z]', '_', config.name)}_{config.version}_{next(_serial)}"
        self._module: ModuleType | None = None
        _check_syntax(self._file)

    def load(self) -> None:
        """Run the module; blocks for as long as it takes.

        Raises:
            InvalidArgument: it failed; the message names file and line.
        """
        package = ModuleType(self._package)
        package.__path__ = [str(self._file.parent)]
        sys.modules[self._package] = package
        sys.meta_path.insert(0, self)
        name = f"{self._package}.{self._file.stem}"
        loader = _SourceLoader(name, str(self._file))
        module = module_from_spec(ModuleSpec(name, loader, origin=str(self._file)))
        module.__file__ = str(self._file)
        setattr(module, HOLDER, self._owner)
        sys.modules[name] = module
        try:
            loader.exec_module(module)
            self._module = module
            run = self.function(ENTRY)
            if run is None or not (inspect.isasyncgenfunction(run) or inspect.iscoroutinefunction(run)):
                raise TypeError(f"'{ENTRY}' must be an 'async def' of this directory")
            inspect.signature(run).bind("request", "lookup")
        except BaseException as error:
            log.error("%s cannot be imported", self._owner, exc_info=error)
            self.unload()
            raise InvalidArgument(f"{self._owner} cannot be imported: {self._import_error(error)}") from None

    def unload(self) -> None:
        """Forget the modules."""
        self._module = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.partition(".")[0] == self._package]:
            del sys.modules[name]

    def run(self, request: NamedTensors, lookup: Lookup) -> Any:
        """What the function `run` returns: an async generator, or a coroutine."""
        return getattr(self._module, ENTRY)(request, lookup)

    def function(self, name: str) -> Callable[..., Any] | None:
        """A function that the code defines; one of that name which it imports from elsewhere is none."""
        function = getattr(self._module, name, None)
        own = callable(function) and getattr(function, "__module__", "").partition(".")[0] == self._package
        return function if own else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module beside `pipeline.py`: the interpreter's import asks."""
        if fullname.partition(".")[0] != self._package or not path:
            return None
        finder = FileFinder(path[0], (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES))
        return finder.find_spec(fullname)

    def where(self, error: BaseException) -> str:
        """The place in the code that an exception came through last, as " (file:line)"; empty if there is none."""
        frames = traceback.extract_tb(error.__traceback__)
        places = [place for frame in frames if (place := self.place(frame.filename, frame.lineno or 0))]
        return f" ({places[-1]})" if places else ""

    def place(self, filename: str, line: int) -> str:
        """A line of a file of the code, by its path from the repository; empty for another file."""
        return (
            f"{Path(filename).relative_to(self._root)}:{line}"
            if Path(filename).is_relative_to(self._file.parent)
            else ""
        )

    def _import_error(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.filename:
            return _syntax_error(Path(error.filename), error)
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.partition(".")[0]
            beside = self._file.with_name(name)
            if beside.is_dir() or beside.with_suffix(".py").is_file():
                hint = f"; a module beside it is imported by 'from . import {name}'"
        return f"{type(error).__name__}: {error}{self.where(error)}{hint}"
