"""A line for a shell that asks a model something: what `charonia import` tells people to try."""

import json
import shlex
from collections.abc import Sequence
from math import prod
from typing import Any
from urllib.parse import quote

from ..core.model import ModelConfig
from ..core.tensor import TensorSpec
from ..repository.backend_registry import ENCODER_BACKEND, LANGUAGE_MODEL_BACKEND

_FREE_SIZE = 8
"""The size that a free dimension has in the line to try."""

_MAX_SHOWN = 32
"""Elements that are written out in it."""


def curl_line(config: ModelConfig) -> str:
    """A command line that asks a model something."""
    base, model = "localhost:8000", f"/v2/models/{quote(config.name)}"
    inputs = {spec.name for spec in config.inputs}
    if config.backend == LANGUAGE_MODEL_BACKEND:
        return _curl(f"-N {base}{model}/generate_stream", {"text_input": "Once upon a time", "max_tokens": 32})
    if config.backend != ENCODER_BACKEND:
        return _tensor_curl(f"-s {base}{model}/infer", config)
    if "text_pair" not in inputs:
        return _curl(f"-s {base}/v1/embeddings", {"model": config.name, "input": ["some text", "another"]})
    if config.outputs[0].dims == (1,):
        question = {"model": config.name, "query": "what is it", "documents": ["some text", "another"]}
        return _curl(f"-s {base}/v1/rerank", question)
    return _curl(f"-s {base}{model}/infer", {"inputs": [_text("text_input", "some text")]})


def _text(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [text]}


def _curl(call: str, body: Any) -> str:
    return f"curl {call} -d {shlex.quote(json.dumps(body))}"


def _tensor_curl(call: str, config: ModelConfig) -> str:
    """Zeros for each input; a tensor that is too long for a line is made by Python."""
    inputs = [_zeros(spec, config.max_batch_size > 0) for spec in config.inputs if not spec.optional]
    if all(len(tensor["data"]) <= _MAX_SHOWN for tensor in inputs):
        return _curl(call, {"inputs": inputs})
    texts = [
        json.dumps({**tensor, "data": None}).replace(
            "null", f"[{json.dumps(tensor['data'][0])}] * {len(tensor['data'])}"
        )
        for tensor in inputs
    ]
    program = f'import json; print(json.dumps({{"inputs": [{", ".join(texts)}]}}))'
    return f"python3 -c {shlex.quote(program)} | curl {call} -d @-"


def _zeros(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    dims: Sequence[int] = [_FREE_SIZE if dim < 0 else dim for dim in spec.dims]
    shape = [1, *dims] if batched else list(dims)
    element = "text" if spec.datatype == "BYTES" else 0
    return {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": [element] * prod(shape)}
