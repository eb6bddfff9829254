"""Adapters that clients send with their requests, by a number: `lora_task_id` of Triton's TensorRT-LLM backend.

An adapter is written as a PEFT directory, which the engine reads as any other. Numbers belong to a tenant, and an
adapter that was unloaded must be sent again. The tensors are those of `hf_lora_convert.py` in
https://github.com/NVIDIA/TensorRT-LLM.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ...core.adapter import LoraTask
from ...core.errors import InvalidArgument
from ...processes.scratch import ScratchDirectory
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import ModelSpec
from .adapters import AdapterTable, TaskKey

_PEFT_PREFIX = "base_model.model.model.layers"


class _Projection(NamedTuple):
    """A linear layer: its path in a decoder's layer, and its sizes."""

    path: str
    inputs: int
    outputs: int


class TaskAdapters:
    """Loads the adapters that clients send into a model's table. `checkpoint`: the model's, whose shapes they have."""

    def __init__(self, table: AdapterTable, checkpoint: str, max_rank: int) -> None:
        self._table = table
        self._checkpoint = checkpoint
        self._max_rank = max_rank
        self._spec: ModelSpec | None = None
        self._sent: dict[TaskKey, bytes] = {}
        """Digests of the adapters that clients sent and the table has."""
        self._loading = asyncio.Lock()

    async def load(self, task: LoraTask, tenant: str) -> TaskKey:
        """The key of a task in the table. Weights that come with it are loaded, unless they are loaded already.

        Raises:
            InvalidArgument: its tensors are wrong, or too many.
        """
        key = TaskKey(tenant, task.number)
        if task.weights is None or task.config is None:
            if task.weights is not task.config:
                raise _wrong("lora_weights and lora_config go together")
            return key
        async with self._loading:
            digest = await asyncio.to_thread(_digest_of, task.weights, task.config)
            if self._sent.get(key) != digest or not self._table.has(key):
                scratch = ScratchDirectory()
                try:
                    await asyncio.to_thread(self._write, scratch.path, task.weights, task.config)
                    await self._table.load(key, str(scratch.path), replace=True, scratch=scratch)
                except BaseException:
                    scratch.close()
                    raise
                self._sent = {known: sent for known, sent in self._sent.items() if self._table.has(known)}
                self._sent[key] = digest
        return key

    def _write(self, directory: Path, weights: NDArray[Any], config: NDArray[Any]) -> None:
        self._spec = self._spec or open_checkpoint(self._checkpoint).spec
        tensors = dict(read_task_tensors(self._spec, weights, config, self._max_rank))
        # All have one rank, and alpha is the same: B is scaled already.
        rank = max(len(matrix) for name, matrix in tensors.items() if name.endswith("lora_A.weight"))
        modules = sorted({name.split(".")[-3] for name in tensors})
        described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (directory / "adapter_config.json").write_text(json.dumps(described))
        padded = {name: _padded(name, matrix, rank) for name, matrix in tensors.items()}
        save_file(padded, directory / "adapter_model.safetensors")


def read_task_tensors(
    spec: ModelSpec, weights: NDArray[Any], config: NDArray[Any], max_rank: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The matrices of a task by PEFT's names, A as [rank, inputs] and B as [outputs, rank].

    `config` [rows, 3]: module, layer and rank. `weights` [rows, longest]: A, then B, scaled, then zeros.

    Raises:
        InvalidArgument: the model has no such module or layer, or a row does not have the size of its rank.
    """
    rows = config.reshape(-1, 3).tolist() if config.size and not config.size % 3 else []
    if not rows or weights.size % len(rows):
        raise _wrong("lora_config must be rows of module, layer and rank, and lora_weights a row for each of them")
    modules = _modules(spec)
    seen = set[tuple[int, int]]()
    for row, (module, layer, rank) in zip(weights.reshape(len(rows), -1), rows, strict=True):
        where = f"module {module} of layer {layer}"
        if module not in modules:
            known = ", ".join(map(str, modules))
            raise _wrong(f"lora_config: {where} is none of this model's; its modules are {known}")
        if not 0 <= layer < spec.layers or (module, layer) in seen:
            raise _wrong(f"lora_config: {where} is there twice, or not among the {spec.layers} layers")
        if not 1 <= rank <= max_rank:
            raise _wrong(f"lora_config: {where} must have a rank from 1 to {max_rank}, got {rank}")
        seen.add((module, layer))
        parts = modules[module]
        ends = np.cumsum([part.outputs for part in parts])
        inputs, outputs = parts[0].inputs, int(ends[-1])
        needed = rank * (inputs + outputs)
        if row.size < needed or row[needed:].any():
            raise _wrong(f"lora_weights: {where} of rank {rank} has {needed} numbers and then zeros, got {row.size}")
        down = row[: rank * inputs].reshape(rank, inputs)
        up = row[rank * inputs : needed].reshape(outputs, rank)
        for part, matrix in zip(parts, np.split(up, ends[:-1]), strict=True):
            yield f"{_PEFT_PREFIX}.{layer}.{part.path}.lora_A.weight", down
            yield f"{_PEFT_PREFIX}.{layer}.{part.path}.lora_B.weight", matrix


def _modules(spec: ModelSpec) -> Mapping[int, tuple[_Projection, ...]]:
    """TensorRT-LLM's numbers of modules -> their linear layers; those of a module have one A."""
    if spec.gemma is not None:
        raise _wrong("lora_weights: the layers of this model are of different sizes; bring its adapters as files")
    hidden, wide = spec.hidden_size, spec.intermediate_size
    heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    output = _Projection("self_attn.o_proj", heads, hidden)
    down = _Projection("mlp.down_proj", wide, hidden)
    if spec.architecture == "Phi3ForCausalLM":
        qkv = _Projection("self_attn.qkv_proj", hidden, heads + 2 * kv_heads)
        return {0: (qkv,), 4: (output,), 6: (down,), 18: (_Projection("mlp.gate_up_proj", hidden, 2 * wide),)}
    query = _Projection("self_attn.q_proj", hidden, heads)
    key, value = (_Projection(f"self_attn.{name}_proj", hidden, kv_heads) for name in ("k", "v"))
    gate, up = (_Projection(f"mlp.{name}_proj", hidden, wide) for name in ("gate", "up"))
    single = {1: query, 2: key, 3: value, 4: output, 5: gate, 6: down, 7: up}
    return {0: (query, key, value), **{number: (projection,) for number, projection in single.items()}}


def _padded(name: str, matrix: NDArray[Any], rank: int) -> NDArray[Any]:
    """The matrix with zeros up to `rank`."""
    missing = rank - matrix.shape[0 if name.endswith("lora_A.weight") else 1]
    widths = ((0, missing), (0, 0)) if name.endswith("lora_A.weight") else ((0, 0), (0, missing))
    return np.ascontiguousarray(np.pad(matrix, widths))


def _digest_of(*arrays: NDArray[Any]) -> bytes:
    digest = sha256()
    for array in arrays:
        digest.update(str(array.size).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="lora_config" if message.startswith("lora_config") else "lora_weights")
