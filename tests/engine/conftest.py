"""Tiny checkpoints on disk, made once per run, and what transformers generates with them."""

import inspect
import json
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from charonia.engine import gpu
from charonia.engine.cpu import library

# No tensor here is spread over devices: to see whether one is, the first comparison would import all that spreads them.
torch.testing._comparison._HAS_DTENSOR = False  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def cores_and_ranks(copied_children: None) -> None:
    """They begin with torch imported, as copies."""


@pytest.fixture(scope="session")
def checkpoint(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with the named configuration of tests/checkpoints.py, changed by keywords."""
    made: dict[str, Path] = {}

    def make(name: str = "llama", **changes: Any) -> Path:
        key = f"{name}-{sorted(changes.items())}"
        if key not in made:
            made[key] = making.write_checkpoint(tmp_path_factory.mktemp(name), making.CONFIGS[name] | changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights, whose token 7 is the word w7; 90 ends a text."""
    directory = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token_id": 90, "vocab_size": 100, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }} w0")
    return directory


@pytest.fixture(scope="session")
def kernels() -> dict[str, ModuleType]:
    """The modules of engine/gpu by name, on Triton's interpreter (tests/conftest.py asks for it)."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    _hasten_the_interpreter()
    names = [module.name for module in pkgutil.iter_modules(gpu.__path__)]
    return {name: import_module(f"{gpu.__name__}.{name}") for name in names}


def _hasten_the_interpreter() -> None:
    """For each launch, and for each function that a kernel calls, the interpreter sorts all attributes of Triton's
    modules and replaces its functions; it makes a type for each result, and computes sums and products once more to see
    whether they overflow, which it then tells nobody: all that takes longer than most kernels compute."""
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _keep_types(interpreter)
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def builtins(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if is_builtin(member)]

    def patch_builtins(module: Any, builder: Any, scope: Any) -> None:
        for name in builtins(module):
            if is_builtin(member := getattr(module, name)):
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins
    tl, patch_language = interpreter.tl, interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def patch_language_once(_: Any) -> Any:
        return patch_language(everything) if is_builtin(tl.load) else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language_once
    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_numbers(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        return dot(builder, _numbers(a), _numbers(b), d, *precision)

    interpreter.InterpreterBuilder.create_dot = dot_of_numbers


def _keep_types(interpreter: Any) -> None:
    """Types of blocks, what tensors of a type have in common, and numpy's types are made once."""
    core, np_dtype = interpreter.tl.core, interpreter._get_np_dtype
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types, tensors, numpy_types = dict[Any, Any](), dict[str, Any](), dict[str, Any]()

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name])
        self.handle, self.type = handle, type

    def known_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = np_dtype(scalar)
        return numpy_types[scalar.name]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = known_np_dtype


def _numbers(tile: Any) -> Any:
    """A tile whose numbers numpy can multiply: the interpreter keeps those of bfloat16 as their bits, and its products
    take the bits for integers."""
    from triton.runtime import interpreter

    tl = interpreter.tl
    if tile.dtype.scalar != tl.bfloat16:
        return tile
    return interpreter.TensorHandle((tile.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture
def short_pieces(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> int:
    """So many inputs, in two tiles, are a piece of a product with an adapter: of 2048 most would be masked here."""
    size = 128
    monkeypatch.setattr(kernels["lora"], "_PIECE", size)
    return size


@pytest.fixture
def interpreted(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and backends that a test builds in this process are those of a GPU."""
    monkeypatch.setenv(library.LEVEL_VARIABLE, "triton")
    monkeypatch.setattr(library, "level", lambda: None)


@pytest.fixture
def sums_of_a_gpu(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter adds as tensor cores and warps do, where numpy's order is that of the processor: an element of a
    product takes its inputs in order, whatever the tile; a sum of floats is taken in an order that the whole tile's
    shape decides, so a kernel that may not depend on its tile's size does not live by one."""
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def add_in_order(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.data.dtype.kind == "i" or a.dtype.primitive_bitwidth == 8:
            return dot(builder, a, b, d, *precision)
        a, b = _numbers(a), _numbers(b)
        total = d.data.copy()
        for left, right in zip(a.data.T.astype(total.dtype), b.data.astype(total.dtype), strict=True):
            total += left[:, None] * right
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def add_by_shape(reduction: Any, tile: Any) -> Any:
        data = tile.handle.data
        if data.dtype.kind == "f" and data.ndim:
            axis = 0 if reduction.axis is None else reduction.axis
            data = np.roll(data, data.size // data.shape[axis] % 7, axis)
        summed = np.sum(data, axis=reduction.axis, keepdims=reduction.keep_dims)
        return reduction.to_tensor(summed, tile.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", add_in_order)
    monkeypatch.setattr(interpreter.ReduceOps, "sum", add_by_shape)
