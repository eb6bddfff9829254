"""Models of a few lines in place of backends, and repositories of a few files."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import CharoniaError, InvalidArgument
from charonia.core.metrics import VersionStatistics
from charonia.core.model import Capabilities, MemoryNeed, Model, ModelConfig, ModelSamples, ModelStats
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.runtime import RuntimeLoader
from charonia.core.tensor import Tensor
from charonia.processes.host import Cores
from charonia.repository import backend_registry, lifecycle
from charonia.repository.backend_registry import OwnBackend
from charonia.repository.builder import ModelBuilder
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.gateway import InProcessGateway
from charonia.repository.memory_budget import DeviceMemory, MemoryBudget
from charonia.repository.model_control import ModelControl
from charonia.repository.on_demand import OnDemandLimits, OnDemandLoader
from charonia.repository.watcher import RepositoryWatcher

from ..waiting import until

CONFIG = """
backend: "toy"
input { name: "A" data_type: TYPE_INT32 dims: 1 }
output { name: "A" data_type: TYPE_INT32 dims: 1 }
"""

STEP = (
    'step { model_name: "%s" model_version: -1 input_map { key: "A" value: "A" } output_map { key: "%s" value: "%s" } }'
)
ENSEMBLE = """
platform: "ensemble"
input { name: "A" data_type: TYPE_INT32 dims: 1 }
%s
ensemble_scheduling { %s }
"""

_NO_SAMPLES = ModelSamples()


class Toy:
    """Answers with its directory's file `answer`; a file `fails` fails its load, saying what stands in it, and a file
    `hangs` holds it up.

    A request with the parameter `wait` gets its answer when `go` is set.
    """

    loaded: list["Toy"]
    capabilities = Capabilities()

    def __init__(
        self,
        config: ModelConfig,
        loader: object,
        directory: Path,
        parameters: Mapping[str, str] | None = None,
        samples: ModelSamples = _NO_SAMPLES,
        quantiles: tuple[float, ...] = (),
        limiter: object = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.parameters = dict(parameters or {})
        self.warm_up = samples.warmup_requests
        self.answer = (directory / "answer").read_text()
        self.made_in = threading.current_thread()
        self.go = asyncio.Event()
        self.sequences = 0
        self.unloaded = False

    async def load(self) -> None:
        await until(lambda: not (self.directory / "hangs").exists())
        fails = self.directory / "fails"
        if fails.exists():
            raise InvalidArgument(fails.read_text())
        type(self).loaded.append(self)

    async def unload(self) -> None:
        assert not self.unloaded
        self.unloaded = True

    def stats(self) -> ModelStats:
        return ModelStats(True, sequences=self.sequences)

    def statistics(self) -> VersionStatistics:
        return VersionStatistics()

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        if request.parameters.get("wait"):
            await self.go.wait()
        assert not self.unloaded
        yield InferResponse((Tensor.from_values("A", "INT32", [int(self.answer)]),))


class ToyLoader:
    """A directory with files `size` or `contradicts` completes its config; needs as many bytes as `needs` has, of each
    GPU that its instances are on or else of the host's."""

    def uses_gpus(self) -> bool:
        return True

    def needs(self, directory: Path, raw: Mapping[str, Any], parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        size = (directory / "needs").stat().st_size if (directory / "needs").exists() else 0
        gpus = [gpu for group in raw["instance_group"] for gpu in group.get("gpus", ())]
        return tuple(MemoryNeed(size, gpu) for gpu in gpus or [None])

    def forget(self) -> None:
        pass

    def file_parameters(self, directory: Path, parameters: Mapping[str, str]) -> dict[str, str]:
        return {}

    def complete(self, directory: Path, raw: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
        if (directory / "size").exists() and not raw["max_batch_size"]:
            return {**raw, "max_batch_size": int(parameters["default-max-batch-size"])}
        if (directory / "contradicts").exists():
            raise InvalidArgument("the file says otherwise", field="input.A.dims")
        return dict(raw)


TOYS = ToyLoader()


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> list[Toy]:
    """The backend `toy`; every model of it that was loaded."""
    Toy.loaded = []
    monkeypatch.setitem(backend_registry.OWN_BACKENDS, "toy", OwnBackend(RuntimeLoader, "toy", "TOYS"))
    monkeypatch.setattr(backend_registry, "classic_runtime_loader", lambda *_: TOYS)
    monkeypatch.setattr("charonia.repository.builder.classic_runtime_loader", lambda *_: TOYS)
    monkeypatch.setattr("charonia.repository.builder.classic_model_builder", lambda: Toy)
    return Toy.loaded


NO_PAUSES: dict[str, Any] = {"idle": 0, "resident": 0, "loads": 1, "wait": 30, "waiting": 100, "tenant_waiting": 100}


class World:
    """A repository, and a gateway that serves it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gateway = InProcessGateway()
        self.catalog = RepositoryCatalog([root])
        self.watcher = RepositoryWatcher(self.catalog, self.gateway.registry, self.gateway.lifecycle)
        self.failures: dict[str, str] = {}
        self.loads: list[str] = []
        self.described: list[str] = []

    def write(self, name: str, answers: Mapping[str, int], config: str = CONFIG) -> Path:
        """A model whose versions answer so; versions that it had and has no more stay."""
        for version, answer in answers.items():
            (self.root / name / version).mkdir(parents=True, exist_ok=True)
            (self.root / name / version / "answer").write_text(str(answer))
        (self.root / name / "config.pbtxt").write_text(config)
        return self.root / name

    def write_ensemble(self, name: str, *steps: str) -> Path:
        """An ensemble that answers as the first of its steps does, of which those that are ensembles are written."""
        configs = [self.root / step / "config.pbtxt" for step in steps]
        outputs = ["B" if file.exists() and "ensemble" in file.read_text() else "A" for file in configs]
        tensors = ["B", *(f"B{number}" for number in range(1, len(steps)))]
        declared = [f'output {{ name: "{tensor}" data_type: TYPE_INT32 dims: 1 }}' for tensor in tensors]
        written = [STEP % step for step in zip(steps, outputs, tensors, strict=True)]
        return self.write(name, {"1": 0}, ENSEMBLE % (" ".join(declared), " ".join(written)))

    def explicit(self) -> None:
        self.gateway.model_control = ModelControl(self.catalog, self.gateway.registry, self.gateway.lifecycle)

    async def start(self) -> bool:
        return await self.watcher.load_initial(self.catalog.model_names(), self)

    async def ask(self, name: str, version: str = "", **parameters: Any) -> int:
        request = InferRequest(inputs={"A": Tensor.from_values("A", "INT32", [1])}, parameters=parameters)
        with self.gateway.open_request("test") as context:
            stream = (await self.gateway.acquire(context, name, version)).infer(request)
            try:
                response = await anext(stream)
            finally:
                await stream.aclose()
        return int(response.outputs[0].scalar)

    def states(self) -> dict[tuple[str, str], str]:
        known = [each for entry in self.gateway.registry.entries.values() for each in entry.index()]
        return {(each.name, each.version): str(each.state) for each in known}

    def on_demand(self, budget: int, now: Callable[[], float] = time.monotonic, **limits: Any) -> OnDemandLoader:
        """Models load when they are asked for, into so many bytes; `limits`: of `OnDemandLimits`, without pauses."""
        budgeted = ModelBuilder(budget=MemoryBudget(DeviceMemory(lambda: 2**60, limit=budget)))
        self.gateway = InProcessGateway(builder=budgeted)
        registry, lifecycle = self.gateway.registry, self.gateway.lifecycle
        settings = OnDemandLimits(**{**NO_PAUSES, **limits})
        loader = self.gateway.on_demand = OnDemandLoader(self.catalog, registry, lifecycle, settings, clock=now)
        self.watcher = RepositoryWatcher(self.catalog, registry, lifecycle, on_demand=loader)
        return loader

    # As a LoadListener

    def on_described(self, name: str) -> None:
        self.described.append(name)

    def on_loading(self, name: str) -> Callable[[str, float, float, str], None]:
        return lambda *phase: None

    def on_loaded(self, name: str, seconds: float) -> None:
        self.loads.append(name)

    def on_failed(self, name: str, reason: str) -> None:
        self.failures[name] = reason


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores, without GPUs."""
    monkeypatch.setattr(lifecycle, "usable_cores", lambda: Cores(2, 2, 1, math.inf))
    monkeypatch.setattr(lifecycle, "usable_gpus", lambda: ())


@pytest.fixture
def world(tmp_path: Path, toys: list[Toy]) -> World:
    return World(tmp_path)


def model_of(gateway: InProcessGateway, name: str, version: str = "") -> Model:
    return gateway.registry.find_loaded(name, version).model


def refused(error: type[CharoniaError], text: str) -> Any:
    return pytest.raises(error, match=f"^{text}$")
