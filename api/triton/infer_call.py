"""What a v2 request over HTTP asks, and how it wants to be answered."""

from collections.abc import Mapping
from typing import NamedTuple

from ...core.request import InferRequest
from ..deferred_tensors import DeferredInputs


class OutputRequest(NamedTuple):
    """How one output is to be answered. `classes`: as that many classes, 0 for its numbers; `memory`: into this, which
    the client lends."""

    binary: bool = False
    classes: int = 0
    memory: memoryview | None = None


class HttpInferRequest(NamedTuple):
    """What is asked, and how to answer: outputs by name, `rest` those that nobody named. `later`: inputs that are empty
    in the request until somebody decodes them."""

    request: InferRequest
    outputs: Mapping[str, OutputRequest]
    default_output: OutputRequest
    deferred: DeferredInputs = {}
