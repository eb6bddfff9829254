"""Which of our files one request passes, in all processes of a server that runs on loopback ports.

A file counts when a function of it is called between the request and its whole answer. What a process does beside, such
as its own clockwork, counts too: it runs in the same files.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from charonia.bench.server_process import ServerAddress, fetch, own_server

from .. import tiny_model
from ..onnx_models import write_mlp
from . import call_recorder

_MLP = "mlp"
_WIDE = 16
_MLP_CONFIG = f'name: "{_MLP}"\nbackend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching {{ }}\n'
_SETTLE_SECONDS = 0.3
"""Until every process has seen that a recording begins, or has written what it noted."""


class TracedRequest(NamedTuple):
    """One request and the only model of the server that answers it: `write_model` makes a model repository."""

    write_model: Callable[[Path], None]
    send: Callable[[ServerAddress], None]


def _write_llm(repository: Path) -> None:
    tiny_model.write_llm(repository, {"threads": 1, "kv_cache_bytes": 16 << 20})


def _send_chat(address: ServerAddress) -> None:
    message = {"role": "user", "content": "one request"}
    body = {"model": tiny_model.NAME, "messages": [message], "max_tokens": 8, "temperature": 1, "stream": True}
    fetch(address, "/v1/chat/completions", body)


def _write_onnx(repository: Path) -> None:
    write_mlp(repository / _MLP / "1" / "model.onnx", (_WIDE, _WIDE))
    (repository / _MLP / "config.pbtxt").write_text(_MLP_CONFIG)


def _send_infer(address: ServerAddress) -> None:
    tensor = np.ones((1, _WIDE), np.float32).tobytes()
    given = {"name": "INPUT", "datatype": "FP32", "shape": [1, _WIDE], "parameters": {"binary_data_size": len(tensor)}}
    wanted = {"name": "OUTPUT", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    fetch(address, f"/v2/models/{_MLP}/infer", head + tensor, headers=headers)


REQUESTS: Mapping[str, TracedRequest] = {
    "a streamed chat": TracedRequest(_write_llm, _send_chat),
    "a binary ONNX infer": TracedRequest(_write_onnx, _send_infer),
}


def files_of_request(python: Path, root: Path, traced: TracedRequest) -> list[str]:
    """The files below `root` that a request passes in a server that `python` runs.

    Raises:
        Unavailable: the server does not start.
    """
    with TemporaryDirectory(prefix="charonia-house-") as directory:
        scratch = Path(directory)
        record, models = scratch / "record", scratch / "models"
        record.mkdir()
        models.mkdir()
        shutil.copy(call_recorder.__file__, record / "sitecustomize.py")
        traced.write_model(models)
        paths = [str(record), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        with own_server("--model-repository", str(models), python=str(python), environment=environment) as address:
            called = _record(address, traced.send, record)
    ours = (path.relative_to(root) for path in map(Path, called) if path.is_relative_to(root))
    return sorted(path.as_posix() for path in ours if path.parts[0] not in (".venv", "build"))


def _record(address: ServerAddress, send: Callable[[ServerAddress], None], record: Path) -> set[str]:
    """The files of all functions that are called while one request is answered."""
    for _ in range(3):  # what is imported, cached or learnt by the first requests is no part of every request
        send(address)
    time.sleep(_SETTLE_SECONDS)
    flag = record / call_recorder.FLAG
    flag.touch()
    time.sleep(_SETTLE_SECONDS)
    send(address)
    time.sleep(_SETTLE_SECONDS)
    flag.unlink()
    time.sleep(_SETTLE_SECONDS)
    return {name for written in record.glob("*.json") for name in json.loads(written.read_text())}
