"""The `onnxruntime` backend: ONNX models as Triton runs them, on the CPU or what else onnxruntime was built for.

onnxruntime is an extra (`charonia[onnx]`), imported when the first such model is loaded.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unsupported
from ...core.memory_needs import Share
from ...core.model import Document, ModelConfig
from ...processes.host import give_back_memory
from ..backend_parameters import report_unknown
from ..config_completion import check_fit, completed, is_complete
from ..instance_groups import bytes_of, each_memory, read_slots
from ..runtime import Arrays, Place, Runtime, Traits
from .session_plan import KNOWN, read_plan

if TYPE_CHECKING:
    from .onnx_session import Session
    from .onnx_values import Run

_FILE = "model.onnx"
_COMPLAINT = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxLoader:
    """Loads `model.onnx`, or what `default_model_filename` names; either may be a directory with that file in it.

    What was opened to complete a config is kept for the load that follows, or until the next config: a file is read
    once.
    """

    def __init__(self) -> None:
        self._completed: Session | None = None

    def load(self, directory: Path, config: ModelConfig, place: Place, parameters: Mapping[str, str]) -> Runtime:
        sessions = _import_sessions()
        report_unknown(config.name, parameters, KNOWN)
        plan = read_plan(config.document, place, parameters)
        session = sessions.open_session(_file(directory, config.document), plan)
        self._completed = None
        check_fit(config, sessions.describe(session))
        return OnnxRuntime(session, config)

    def needs(self, directory: Path, document: Document, parameters: Mapping[str, str]) -> tuple[Share, ...]:
        """The instances on a device share the weights."""
        file = _file(directory, document)
        return each_memory(document, bytes_of(file if file.parent == directory else file.parent))

    def complete(self, directory: Path, document: Document, parameters: Mapping[str, str]) -> Document:
        if is_complete(document):
            return document
        sessions = _import_sessions()
        self._completed = None
        plan = read_plan(document, read_slots("", document)[0].place, parameters)
        self._completed = sessions.open_session(_file(directory, document), plan)
        return completed(document, sessions.describe(self._completed), parameters)

    def uses_gpus(self) -> bool:
        return "CUDAExecutionProvider" in _import_sessions().onnxruntime.get_available_providers()


def _import_sessions() -> Any:
    # Its wheels report to their maker otherwise, from the import on.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        from . import onnx_session
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        message = "ONNX models need the package onnxruntime, which is not installed: pip install 'charonia[onnx]'"
        raise Unsupported(message, field="backend") from None
    return onnx_session


def _file(directory: Path, document: Document) -> Path:
    """A directory of that name holds the file and its weights."""
    name = document.get("default_model_filename") or _FILE
    return directory / name / name if (directory / name).is_dir() else directory / name


class OnnxRuntime:
    """One instance: a session that it shares with the others, held until it is closed."""

    def __init__(self, session: "Session", config: ModelConfig) -> None:
        from .onnx_values import runner

        self._session: Session | None = session
        self._options = session.run_options()
        self._run: Run | None = runner(session.session, self._options, config.inputs, config.outputs)
        self._ended = ""

    @property
    def traits(self) -> Traits:
        return Traits(ragged=True, end=self._end)

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        assert self._run is not None
        if self._ended:
            self._ended, self._options.terminate = "", False
        try:
            made = self._run(inputs, wanted)
        except CharoniaError:
            raise
        except Exception as error:
            raise Internal(self._ended) if self._ended else _refusal(error) from error
        yield dict(zip(wanted, made, strict=True))

    def _end(self, reason: str) -> None:
        self._ended, self._options.terminate = f"onnx runtime error: the run was ended: {reason}", True

    def close(self) -> None:
        self._session = self._run = None
        give_back_memory()


def _refusal(error: Exception) -> CharoniaError:
    """onnxruntime's complaint in Triton's words."""
    if isinstance(error, UnicodeDecodeError):  # onnxruntime gives strings as text alone
        return Internal(f"onnx runtime error: an output of the model is not UTF-8: {error}")
    if isinstance(error, ValueError):  # an input that only its config calls optional
        return InvalidArgument(str(error))
    found = _COMPLAINT.match(str(error))
    return Internal(f"onnx runtime error {found[1]}: {found[2]}" if found else f"onnx runtime error: {error}")


ONNX = OnnxLoader()
