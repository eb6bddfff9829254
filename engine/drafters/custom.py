"""A drafter of somebody's own: a class `Drafter` in a file that the command line names."""

import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from operator import index
from pathlib import Path
from typing import Any

from ...core.errors import InvalidArgument
from ...scheduler.speculation import Drafter, DraftRequest, LearningDrafter

_CLASS, _MODULE = "Drafter", "charonia_custom_drafter"


class CustomDrafter:
    """The class of the file at `path`, made with `keys`; what it drafts must be integers.

    Raises:
        InvalidArgument: there is no such file or class, or the file's line that is named raised.
    """

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        if not path.is_file():
            raise _refused(f"there is no file {path}")
        spec = spec_from_file_location(_MODULE, path)
        if spec is None or spec.loader is None:
            raise _refused(f"{path} is not named *.py")
        module = sys.modules[_MODULE] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            made = getattr(module, _CLASS, None)
            self._drafter: Drafter | None = None if made is None else made(**keys)
        except Exception as error:  # somebody's code: whatever it raises is told with its line
            raise _refused(f"{_line_of(error, path)}: {type(error).__name__}: {error}") from error
        if not callable(getattr(self._drafter, "propose", None)):
            raise _refused(f"{path} has no class {_CLASS} with a method propose(requests)")

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`."""
        assert self._drafter is not None
        return [[*map(index, tokens)] for tokens in self._drafter.propose(requests)]

    def finished(self, request: DraftRequest) -> None:
        """See `LearningDrafter`."""
        if isinstance(self._drafter, LearningDrafter):
            self._drafter.finished(request)


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"speculative_config: {reason}", field="speculative_config")


def _line_of(error: Exception, path: Path) -> str:
    """The file and its last line that was reached; the file alone where none was, as for keys that it does not take."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)
