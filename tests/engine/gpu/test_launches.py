"""How many launches a layer of a decode step takes, by family, its products included: docs/performance.md has these
numbers."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.native_decoder import NativeDecoder
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.loaded_rank import load_rank

VIEWS = {"view", "_unsafe_view", "unsqueeze", "slice", "select", "split_with_sizes", "unbind", "t", "expand", "permute"}
VIEWS |= {"detach", "transpose", "empty", "empty_like", "new_empty", "as_strided", "resolve_conj", "resolve_neg"}
VIEWS |= {"flatten", "alias"}
"""Operations of torch that launch nothing."""


class Operations(TorchDispatchMode):
    """Counts the operations of torch that are launches."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        self._counted["product" if "linear" in name or name in ("mm", "addmm") else name] += name not in VIEWS
        return operation(*arguments, **(named or {}))


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("llama", 9),
        ("qwen3", 9),
        ("gemma2", 10),
        ("gemma3", 10),
        ("glm4", 10),
        ("gemma4", 12),
        ("olmo2", 13),
        ("gemma4-small", 18),
    ],
)
def test_a_layer_of_a_decode_step(
    interpreted: None, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, launches: int
) -> None:
    from triton.runtime.interpreter import GridExecutor

    config = EngineConfig(model=str(checkpoint(name)), device="cpu", cache=CacheConfig(block_size=16))
    rank = load_rank(config)
    decoder, attention = rank.runner.computer.decoder, rank.runner.computer.attention
    assert isinstance(decoder, NativeDecoder)
    attention.allocate(2)
    counted = Counter[str]()
    interpret = GridExecutor.__call__

    def launch(kernel: Any, *arguments: Any, **named: Any) -> Any:
        counted[kernel.fn.__name__] += 1
        with _disable_current_modes():
            return interpret(kernel, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    tokens, tables = torch.ones(2, 16, dtype=torch.int32), torch.arange(2).view(2, 1)
    batch = StepBatch(np.arange(2), np.array([3, 5]), np.ones(2), tokens, tables, 16)
    x = torch.ones(2, rank.shape.hidden_size)
    with torch.inference_mode():
        context = StepContext(batch, attention.begin_step(batch))
        for layer in decoder._layers:  # the last one shares nothing but, of one model, its cache
            counted.clear()
            with Operations(counted):
                layer(x, torch.ones_like(x), context)
    rank.close()
    del counted["ones_like"]
    assert counted.total() == launches, str(+counted)
