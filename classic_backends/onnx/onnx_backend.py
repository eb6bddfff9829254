"""The `onnxruntime` backend: ONNX models on the CPU, or on what else onnxruntime was built for.

onnxruntime is an extra (`charonia[onnx]`), imported when the first such model is loaded. Source:
https://github.com/triton-inference-server/onnxruntime_backend.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unsupported
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...processes.host import release_free_memory
from ..backend_parameters import warn_unknown_parameters
from ..config_completion import check_config_matches, complete_config, declares_tensors
from ..instance_groups import memory_shared_by_instances, read_placements
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeTraits
from .session_plan import KNOWN_PARAMETERS, read_session_plan

if TYPE_CHECKING:
    from .onnx_session import Session

_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxLoader:
    """Loads `model.onnx`, or the `default_model_filename`; either may be a directory with a file of that name in it.
    The session that completed a config is kept until the load that follows, or the next config: a file is read once."""

    by_request = False

    def __init__(self) -> None:
        self._completed: Session | None = None

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        _require_onnxruntime()
        from .onnx_session import open_session

        warn_unknown_parameters(config.name, parameters, KNOWN_PARAMETERS)
        plan = read_session_plan(config.raw, placement, parameters)
        session = open_session(_model_file(directory, config.raw), plan)
        self._completed = None
        check_config_matches(config, session.tensors)
        return OnnxRuntime(session)

    def needs(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        file = _model_file(directory, raw)
        return memory_shared_by_instances(raw, file if file.parent == directory else file.parent)

    def complete(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> RawConfig:
        if declares_tensors(raw):
            return raw
        _require_onnxruntime()
        from .onnx_session import open_session

        self._completed = None
        plan = read_session_plan(raw, read_placements("", raw)[0], parameters)
        self._completed = open_session(_model_file(directory, raw), plan)
        return complete_config(raw, self._completed.tensors, parameters)

    def uses_gpus(self) -> bool:
        _require_onnxruntime()
        import onnxruntime

        return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _require_onnxruntime() -> None:
    # Its wheels send telemetry otherwise, from the import on.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        message = "ONNX models need the package onnxruntime, which is not installed: pip install 'charonia[onnx]'"
        raise Unsupported(message, field="backend") from None


def _model_file(directory: Path, raw: RawConfig) -> Path:
    """The model's file; in a directory of that name it lies beside its weights."""
    name = raw.get("default_model_filename") or "model.onnx"
    return directory / name / name if (directory / name).is_dir() else directory / name


class OnnxRuntime:
    """One instance: a session that it shares with the others until it is closed."""

    def __init__(self, session: "Session") -> None:
        self._session: Session | None = session
        self._options = session.run_options()
        self._interrupted = ""

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits(ragged=True, interrupt=self._interrupt)

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        assert self._session is not None
        if self._interrupted:
            self._interrupted, self._options.terminate = "", False
        try:
            outputs = self._session.run(inputs, output_names, self._options)
        except CharoniaError:
            raise
        except Exception as error:
            raise Internal(self._interrupted) if self._interrupted else _in_tritons_words(error) from error
        yield dict(zip(output_names, outputs, strict=True))

    def _interrupt(self, reason: str) -> None:
        self._interrupted, self._options.terminate = f"onnx runtime error: the run was ended: {reason}", True

    def close(self) -> None:
        self._session = None
        release_free_memory()


def _in_tritons_words(error: Exception) -> CharoniaError:
    if isinstance(error, UnicodeDecodeError):  # onnxruntime returns strings as text alone
        return Internal(f"onnx runtime error: an output of the model is not UTF-8: {error}")
    if isinstance(error, ValueError):  # an input that is optional in the config alone
        return InvalidArgument(str(error))
    found = _ERROR.match(str(error))
    return Internal(f"onnx runtime error {found[1]}: {found[2]}" if found else f"onnx runtime error: {error}")


ONNX = OnnxLoader()
