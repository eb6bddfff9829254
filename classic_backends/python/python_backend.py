"""The backend of Python models: `model.py` with a class `TritonPythonModel`, each instance in a process of its own.

The interface is that of https://github.com/triton-inference-server/python_backend#readme.
"""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.errors import Internal, InvalidArgument
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...core.runtime import InstancePlacement, LoadInterruption, Parameters, RuntimeLoader
from ...core.wait_graph import WaitGraph
from ...telemetry.shared_state import ModelServices
from ..backend_config import read_integer, read_placements
from ..python_stub import messages
from .environments import interpreter
from .model_calls import MAX_INFERENCES, ModelCalls
from .python_runtime import FirstAnswer, PythonRuntime, initialize_failure
from .stub_process import Interpreter, MemorySizes, StubProcess

MODEL_FILE = "model.py"

_LIBRARY_BYTES = 40 << 20
"""Memory that a process takes with Python and numpy."""


@dataclass(frozen=True, slots=True)
class PythonBackend(RuntimeLoader):
    """A `RuntimeLoader`; models are loaded once it is bound to a server, which they may call. `code`: the directory of
    the `model.py` of all its models; None where each brings its own."""

    services: ModelServices | None = None
    code: Path | None = None

    def with_code(self, directory: Path) -> "PythonBackend":
        return replace(self, code=directory)

    by_request = True

    @property
    def waits(self) -> WaitGraph | None:
        return None if self.services is None else self.services.gateway.shared_state.waits

    def bound_to(self, services: ModelServices) -> "PythonBackend":
        return replace(self, services=services)

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> PythonRuntime:
        assert self.services is not None
        max_calls = read_integer(parameters, "max-open-calls", MAX_INFERENCES, least=1)
        gateway = self.services.gateway
        loop = self.services.loop
        datatypes = {spec.name: spec.datatype for spec in config.inputs}
        runtime = PythonRuntime(placement.name, datatypes, loop, gateway.shared_state.traces)
        message = messages.Initialize(
            str(self._model_file(directory, config.raw)),
            self._search_path(directory),
            _arguments(directory, config, placement),
            config.decoupled,
        )
        with ExitStack() as resources:
            program = resources.enter_context(interpreter(directory.parent, parameters))
            try:
                process = StubProcess(placement.name, runtime, program, _memory_sizes(parameters))
            except (OSError, MemoryError) as error:
                raise Internal(f"{initialize_failure(placement.name)}: {error}") from None
            calls = ModelCalls(process, gateway, gateway.shared_state.metrics, max_calls)
            runtime.start(process, calls, message, _start_seconds(parameters), self.services.interruption)
            runtime.resources = resources.pop_all()
        return runtime

    def uses_gpus(self) -> bool:
        return True

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        return (MemoryNeed(_LIBRARY_BYTES * len(read_placements("", raw))),)

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        """The config that the model's `auto_complete_config` makes of `raw`, in a process that ends afterwards."""
        message = messages.CompleteConfig(
            str(self._model_file(directory, raw)), self._search_path(directory), json.dumps(dict(raw))
        )
        with interpreter(directory.parent, parameters) as program:
            return asyncio.run(_complete(raw["name"], message, program, _start_seconds(parameters), self._interruption))

    def interrupt_loads(self) -> None:
        self._interruption.request()

    @property
    def _interruption(self) -> LoadInterruption:
        return LoadInterruption() if self.services is None else self.services.interruption

    def _model_file(self, directory: Path, raw: RawConfig) -> Path:
        file = directory / (raw.get("default_model_filename") or MODEL_FILE)
        if self.code is not None:
            file = self.code / MODEL_FILE
        if not file.is_file():
            raise InvalidArgument(f"model '{raw['name']}': there is no file '{file}'")
        return file

    def _search_path(self, directory: Path) -> list[str]:
        """The version's directory comes first."""
        return list(map(str, filter(None, (directory, directory.parent, self.code))))


async def _complete(
    model: str,
    message: messages.CompleteConfig,
    program: Interpreter,
    start_seconds: float,
    interruption: LoadInterruption,
) -> RawConfig:
    name = f"model '{model}'"
    answer = FirstAnswer(name, f"Failed to auto-complete the configuration of {name}")
    process = StubProcess(name, answer, program)
    await process.connect()
    try:
        process.send(message)
        with interruption.calls(answer.abandon):
            completed = await asyncio.to_thread(answer.wait, start_seconds)
    finally:
        await process.close(0)
    config: RawConfig = json.loads(completed.config)
    return config


def _arguments(directory: Path, config: ModelConfig, placement: InstancePlacement) -> dict[str, str]:
    """The argument of the model's `initialize`."""
    return {
        "model_config": json.dumps(config.raw),
        "model_instance_kind": placement.kind.removeprefix("KIND_"),
        "model_instance_name": placement.name,
        "model_instance_device_id": str(placement.device),
        "model_repository": str(directory.parent),
        "model_version": config.version,
        "model_name": config.name,
    }


def _start_seconds(parameters: Parameters) -> int:
    return read_integer(parameters, "stub-timeout-seconds", 30, least=1)


def _memory_sizes(parameters: Parameters) -> MemorySizes:
    initial, growth = MemorySizes()
    return MemorySizes(
        read_integer(parameters, "shm-default-byte-size", initial, least=1),
        read_integer(parameters, "shm-growth-byte-size", growth, least=1),
    )


PYTHON = PythonBackend()
