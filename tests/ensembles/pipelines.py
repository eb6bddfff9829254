"""Pipelines for tests: code written to a version's directory, and a gateway to models that count their streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import numpy as np

from charonia.core.errors import NotFound, Unavailable
from charonia.core.gateway import ModelLookup
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.tensor import Tensor
from charonia.ensembles.composite_model import CompositeModel
from charonia.ensembles.pipeline_model import Pipeline

from .graphs import model, spec, tensor

MODELS = {
    "count": model("count", [spec("UPTO"), spec("stream", "BOOL")], [spec("N")], decoupled=True),
    "text": model("text", [spec("IN", "BYTES"), spec("sampling_parameters", "BYTES", optional=True)], [spec("OUT")]),
    "down": model("down", [spec("IN")], [spec("OUT")]),
}
OUT = "OUT"
"""The name of `text`'s output."""


@dataclass
class Models:
    """A gateway: `count` counts up to its input, `text` echoes, `down` is down. `open`: how many streams are."""

    requests: list[tuple[str, InferRequest]] = field(default_factory=list)
    contexts: list[RequestContext] = field(default_factory=list)
    open: int = 0

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if name not in MODELS:
            raise NotFound(f"unknown model '{name}'")
        return MODELS[name]

    async def unready_reason(self, name: str, version: str = "") -> str:
        return "" if self.is_model_ready(name, version) else f"{name} is not ready"

    def is_model_ready(self, name: str, version: str = "") -> bool:
        return name in MODELS and name != "down"

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> Any:
        self.contexts.append(context)
        return Asked(self, self.model_config(name))


@dataclass
class Asked:
    """The `ModelHandle` of a fake."""

    models: Models
    config: ModelConfig

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        self.models.requests.append((self.config.name, request))
        self.models.open += 1
        try:
            if self.config.name == "down":
                raise Unavailable("'down' is down")
            if self.config.name == "text":
                yield InferResponse((Tensor(OUT, "BYTES", (1,), request.inputs["IN"].data),), {"shouted": False})
                return
            for number in range(int(request.inputs["UPTO"].data[0])):
                await asyncio.sleep(0)
                yield InferResponse((tensor("N", number),))
        finally:
            self.models.open -= 1


def write_code(directory: Path, code: str, version: str = "1", **beside: str) -> Path:
    """A version's directory with this code, and modules beside it."""
    folder = directory / "glue" / version
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"pipeline": code, **beside}.items():
        (folder / f"{name}.py").write_text(dedent(text))
    return folder


def pipeline(
    directory: Path,
    code: str,
    models: Models | None = None,
    *,
    decoupled: bool = True,
    asks: str = "count, text, down",
    version: str = "1",
    **beside: str,
) -> CompositeModel:
    """A pipeline that takes a number X or a text T, and answers with a number Y or a text U."""
    config = ModelConfig(
        "glue",
        version,
        "pipeline",
        decoupled=decoupled,
        inputs=(spec("X", optional=True), spec("T", "BYTES", optional=True)),
        outputs=(spec("Y"), spec("U", "BYTES")) if decoupled else (spec("Y"),),
        parameters={"models": asks},
    )
    gateway = cast(ModelLookup, models or Models())
    return CompositeModel(config, gateway, Pipeline(config, gateway, write_code(directory, code, version, **beside)))


def module_of(glue: CompositeModel) -> Any:
    """The imported code of a loaded pipeline."""
    return cast(Pipeline, glue._composition)._code._module


def request(text: str = "", number: int = 0, **parameters: Any) -> InferRequest:
    text_tensor = Tensor("T", "BYTES", (1,), np.array([text.encode()], object))
    return InferRequest("id", {"X": tensor("X", number), "T": text_tensor}, None, parameters)


async def answers(glue: CompositeModel, asked: InferRequest | None = None, depth: int = 0) -> list[Any]:
    """The first output of each response, as a plain value, of a loaded pipeline."""
    async with aclosing(glue.infer(asked or request(), RequestContext("test", depth=depth))) as responses:
        return [response.outputs[0].scalar async for response in responses]


async def loaded(*arguments: Any, **settings: Any) -> CompositeModel:
    glue = pipeline(*arguments, **settings)
    await glue.load()
    return glue
