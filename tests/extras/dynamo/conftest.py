"""A stand-in for ai-dynamo: what `charonia.extras.dynamo.backend` imports of it, by its names and fields."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

BACKEND = "charonia.extras.dynamo.backend"


class _Record:
    """Something with whatever fields it is made with."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.values = values
        self.__dict__.update(fields)


class _Mode(Enum):
    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class _Flags:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--endpoint")
        parser.add_argument("--discovery-backend", default="etcd")


class _RuntimeConfig(_Record):
    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> "_RuntimeConfig":
        return cls(**vars(arguments))

    def validate(self) -> None:
        self.validated = True


class _WorkerConfig(_Record):
    @classmethod
    def from_runtime_config(cls, runtime: Any, model: str, name: str, **overrides: Any) -> "_WorkerConfig":
        assert runtime.validated
        place = {key: getattr(runtime, key) for key in ("namespace", "component", "endpoint", "discovery_backend")}
        return cls(model_name=model, served_model_name=name, **place, **overrides)


@dataclass
class Context:
    """A request as the runtime knows it."""

    name: str = "r1"

    def id(self) -> str:
        return self.name


@dataclass
class Publisher:
    """Takes what a worker tells of its load."""

    snapshots: list[Any] = field(default_factory=list)

    def publish(self, rank: int, snapshot: Any) -> None:
        assert rank == snapshot.dp_rank
        self.snapshots.append(snapshot)


@dataclass
class WorkerMetrics:
    """The registry of a worker."""

    callbacks: list[Any] = field(default_factory=list)

    def register_prometheus_expfmt_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


async def _register(model_input: str, model_type: int, endpoint: list[Any], path: str, **fields: Any) -> None:
    """The endpoint is a list of what is served there."""
    endpoint.append({"input": model_input, "type": model_type, "path": path, **fields})


def _modules() -> dict[str, dict[str, Any]]:
    errors = ("InvalidArgument", "Unknown", "EngineShutdown", "HttpError")
    exceptions = {name: type(name, (Exception,), {}) for name in errors}
    records = {name: type(name, (_Record,), {}) for name in ("EngineConfig", "LlmRegistration")}
    flags = {"DynamoRuntimeArgGroup": _Flags, "DynamoRuntimeConfig": _RuntimeConfig}
    return {
        "dynamo.common.backend": {**records, "LLMEngine": object, "WorkerConfig": _WorkerConfig},
        "dynamo.common.backend.health_check": {"build_health_check_payload": lambda bos_token_id: {"token_ids": [1]}},
        "dynamo.common.backend.publisher": {"ComponentSnapshot": _Record, "ZmqSource": _Record},
        "dynamo.common.backend.run": {"run": None},
        "dynamo.common.configuration.groups.runtime_args": flags,
        "dynamo.common.constants": {"DisaggregationMode": _Mode},
        "dynamo.llm": {
            "exceptions": type("exceptions", (), exceptions),
            "register_model": _register,
            "ModelInput": _Record(Tokens="tokens"),
            "ModelType": _Record(Chat=1, Completions=2),
            "WorkerType": _Record(Aggregated="aggregated"),
            "ModelRuntimeConfig": _Record,
        },
    }


@pytest.fixture(scope="module")
def stand_in() -> Iterator[None]:
    """ai-dynamo is the stand-in, for whoever imports it first."""
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in sys.modules if name.partition(".")[0] == "dynamo" or name == BACKEND]:
            patched.delitem(sys.modules, name)
        for name, members in _modules().items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if path not in sys.modules:
                    patched.setitem(sys.modules, path, ModuleType(path))
            sys.modules[name].__dict__.update(members)
        yield
        sys.modules.pop(BACKEND, None)
