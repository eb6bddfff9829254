"""The `onnxruntime` backend: ONNX models as Triton runs them, on the CPU or what else onnxruntime was built for.

onnxruntime is an extra (`charonia[onnx]`), imported when the first such model is loaded.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unsupported
from ...core.memory_needs import MemoryNeed
from ...core.model import ConfigDocument, ModelConfig
from ...processes.host import release_free_memory
from ..backend_parameters import warn_unknown_parameters
from ..config_completion import check_config_matches, complete_config, declares_tensors
from ..instance_groups import bytes_on_disk, memory_shared_by_instances, read_instance_slots
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeTraits
from .session_plan import KNOWN_PARAMETERS, read_session_plan

if TYPE_CHECKING:
    from .onnx_session import Session
    from .onnx_values import RunSession

_FILE = "model.onnx"
_COMPLAINT = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxLoader:
    """Loads `model.onnx`, or what `default_model_filename` names; either may be a directory with that file in it.

    What was opened to complete a config is kept for the load that follows, or until the next config: a file is read
    once.
    """

    def __init__(self) -> None:
        self._completed: Session | None = None

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        sessions = _import_sessions()
        warn_unknown_parameters(config.name, parameters, KNOWN_PARAMETERS)
        plan = read_session_plan(config.document, place, parameters)
        session = sessions.open_session(_file(directory, config.document), plan)
        self._completed = None
        check_config_matches(config, sessions.describe_session(session))
        return OnnxRuntime(session, config)

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        """The instances on a device share the weights."""
        file = _file(directory, document)
        return memory_shared_by_instances(document, bytes_on_disk(file if file.parent == directory else file.parent))

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        if declares_tensors(document):
            return document
        sessions = _import_sessions()
        self._completed = None
        plan = read_session_plan(document, read_instance_slots("", document)[0].placement, parameters)
        self._completed = sessions.open_session(_file(directory, document), plan)
        return complete_config(document, sessions.describe_session(self._completed), parameters)

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


def _file(directory: Path, document: ConfigDocument) -> Path:
    """A directory of that name holds the file and its weights."""
    name = document.get("default_model_filename") or _FILE
    return directory / name / name if (directory / name).is_dir() else directory / name


class OnnxRuntime:
    """One instance: a session that it shares with the others, held until it is closed."""

    def __init__(self, session: "Session", config: ModelConfig) -> None:
        from .onnx_values import session_runner

        self._session: Session | None = session
        self._options = session.run_options()
        self._run: RunSession | None = session_runner(session.session, self._options, config.inputs, config.outputs)
        self._ended = ""

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits(ragged=True, interrupt=self._end)

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
        release_free_memory()


def _refusal(error: Exception) -> CharoniaError:
    """onnxruntime's complaint in Triton's words."""
    if isinstance(error, UnicodeDecodeError):  # onnxruntime gives strings as text alone
        return Internal(f"onnx runtime error: an output of the model is not UTF-8: {error}")
    if isinstance(error, ValueError):  # an input that only its config calls optional
        return InvalidArgument(str(error))
    found = _COMPLAINT.match(str(error))
    return Internal(f"onnx runtime error {found[1]}: {found[2]}" if found else f"onnx runtime error: {error}")


ONNX = OnnxLoader()
