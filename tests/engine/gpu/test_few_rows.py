"""Products of few rows on the interpreter: right, each row with the same bits among any others, gates included; and the
choice between the kernel and cuBLAS."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from charonia.bench import gpu_layers
from charonia.bench.gpu_engine import LLAMA_ONE, GpuWork, RandomWeights
from charonia.bench.gpu_layers import NOTHING, LayerBench
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.weights import WeightLoader
from charonia.engine.gpu.few_rows import FewRowMatmul, FewRowProducts, graph_timer
from charonia.engine.gpu.runtime import FEW_ROWS
from charonia.engine.layers.mlp import GatedMLP, GatedMLPSpec
from charonia.engine.layers.step_context import StepContext
from tests.recording import Recorder

from .test_models import PROMPTS, generate


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


@pytest.mark.usefixtures("sums_of_a_gpu")
@pytest.mark.parametrize("least", [64, 4096], ids=["in parts", "whole"])
@pytest.mark.parametrize("activation", ["", "silu", pytest.param("squared_relu", marks=pytest.mark.proof)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    kernels: dict[str, ModuleType], activation: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = kernels["few_rows_kernel"]
    monkeypatch.setattr(kernels["input_parts"], "_LEAST_INPUTS", least)
    tile = module.FewRowsTile(32, 64, 1)
    size, inputs = 20, 170
    outputs = 2 * size if activation == "silu" else size
    weight, bias, x = random(outputs, inputs) * 0.1, random(1, outputs)[0], random(FEW_ROWS, inputs)
    many = module.multiply_few_rows(x, weight, bias, activation, tile)
    whole = F.linear(x.double(), weight.double(), bias.double())
    if activation:
        gate = kernels["gate"].TritonGate(activation)
        whole = gate(whole.half()).double()
    torch.testing.assert_close(many.double(), whole, rtol=4e-3, atol=4e-3)
    assert (module._plan(size, inputs, activation, tile)["PARTS"] > 1) == (least == 64)
    for rows in (slice(15, 16), slice(3, 10)):
        assert torch.equal(module.multiply_few_rows(x[rows], weight, bias, activation, tile), many[rows])


@pytest.mark.usefixtures("sums_of_a_gpu")
def test_a_gate_in_the_product_is_that_behind_it(kernels: dict[str, ModuleType]) -> None:
    """To the bit: the numbers between are rounded as if they were stored."""
    module: Any = kernels["few_rows_kernel"]
    tile = module.FewRowsTile(32, 64, 1)
    weight, x = random(64, 128), random(3, 128)
    plain = tile._replace(inputs=32)  # as deep as a gate's
    behind = kernels["gate"].TritonGate("silu")(module.multiply_few_rows(x, weight, None, "", plain))
    assert torch.equal(module.multiply_few_rows(x, weight, None, "silu", tile), behind)


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 18), st.sampled_from(("", "silu", "squared_relu")))
def test_the_matrix_alone_decides_the_launch(
    kernels: dict[str, ModuleType], size: int, inputs: int, activation: str
) -> None:
    module: Any = kernels["few_rows_kernel"]
    for tile in module.TILES:
        plan = module._plan(size, inputs, activation, tile)
        assert plan["PARTS"] * plan["BLOCK_INPUTS"] < inputs + plan["BLOCK_INPUTS"]
        assert plan["EVEN"] == (inputs % plan["BLOCK_INPUTS"] == 0)


class Clock:
    """Times launches by the shape and the way of the products that they call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[FewRowMatmul], float]) -> None:
        self._taken = 0.0

        def count(product: FewRowMatmul, x: Tensor) -> Tensor:
            self._taken += seconds(product)
            return x

        monkeypatch.setattr(FewRowMatmul, "__call__", count)
        monkeypatch.setattr(FewRowMatmul, "gated", count)

    def __call__(self, launches: Callable[[], None]) -> float:
        self._taken = 0.0
        launches()
        return self._taken


@pytest.mark.usefixtures("interpreted")
def test_the_faster_one_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Shape by shape; what is hardly faster is not worth it, and what fails is left to cuBLAS."""
    products = FewRowProducts(by_kernel=False)
    sizes = (64, 32), (64, 64), (32, 64), (32, 32), (64, 32)
    faster, hardly, slower, failing, again = (products.make(random(*size), None) for size in sizes)
    gains = {faster.shape: 1.2, hardly.shape: 1.02, slower.shape: 0.8}

    def seconds(product: FewRowMatmul) -> float:
        return 1.2e-5 / gains[product.shape] if product.uses_kernel else 1.2e-5

    with caplog.at_level("INFO"), monkeypatch.context() as patch:
        products.choose(Clock(patch, seconds))
    assert [each.uses_kernel for each in (faster, hardly, slower, failing, again)] == [True, False, False, False, True]
    told = [record.getMessage() for record in caplog.records]
    assert "few rows of [64, 32] are computed by the kernel: cuBLAS takes 12.0 us, the kernel 10.0" in told
    assert any(line.startswith("the kernel for few rows fails for [32, 32]") for line in told)
    x = random(FEW_ROWS + 1, 32)
    assert torch.equal(faster(x), F.linear(x, faster.weight))
    torch.testing.assert_close(faster(x[:2]), F.linear(x[:2], faster.weight), rtol=2e-3, atol=2e-2)
    assert faster(x[:0]).shape == (0, 64)


@pytest.mark.usefixtures("interpreted")
def test_products_are_timed_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, waits = Recorder(), list[object]()
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    products = FewRowProducts(by_kernel=False)
    product = products.make(random(16, 32), None)
    products.choose(graph_timer(recorder, torch.device("cuda:0"), times=2))
    assert recorder.captures == 12  # of one row and of many, each way three times
    assert recorder.replays == 3 * recorder.captures
    assert len(waits) == 2 * recorder.captures
    assert isinstance(product.uses_kernel, bool)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_gated_layer_computes_its_gate_with_the_product(bias: bool) -> None:
    """And both without it where rows are many, or adapters may change what is between."""
    weights, products = RandomWeights(torch.float16, torch.device("cpu")), FewRowProducts(by_kernel=True)
    built = BuildContext(torch.float16, torch.device("cpu"), 64, few_rows=products)
    torch.manual_seed(3)
    layer = GatedMLP(WeightLoader(weights, built), GatedMLPSpec("mlp", 32, 24, bias))
    context, x = StepContext(NOTHING, NOTHING), random(FEW_ROWS + 1, 32)
    assert layer._gated is not None
    many = layer(x, context)
    for rows in (1, FEW_ROWS):
        torch.testing.assert_close(layer(x[:rows], context), many[:rows], rtol=5e-3, atol=5e-3)
    adapted = GatedMLP(WeightLoader(weights, built._replace(max_lora_rank=8)), GatedMLPSpec("mlp", 32, 24))
    assert adapted._gated is None


@pytest.mark.proof
def test_a_model_with_it_says_what_it_does_without(
    interpreted: None, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = list[str]()
    for call in (FewRowMatmul.__call__, FewRowMatmul.gated):

        def counted(product: FewRowMatmul, x: Tensor, call: Any = call) -> Tensor:
            assert product.uses_kernel
            computed.append(product.activation)
            return call(product, x)

        monkeypatch.setattr(FewRowMatmul, call.__name__, counted)
    directory = checkpoint("llama")
    found = generate(directory, PROMPTS[:2], TritonAttention, dtype="float16", few_row_kernel="on")
    assert {*computed} == {"", "silu"}
    computed.clear()
    assert generate(directory, PROMPTS[:2], TritonAttention, dtype="float16", few_row_kernel="off") == found
    assert not computed


@pytest.mark.usefixtures("interpreted")
def test_make_gpu_measures_it_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layers, "LAYERS", 1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = LLAMA_ONE | sizes | {"num_attention_heads": 4, "num_key_value_heads": 2}
    computed = list[str]()

    def seconds(compute: Callable[[], object]) -> float:
        computed.append("")
        compute()
        return 1.0

    bench = LayerBench(GpuWork(config=config, dtype="float16"), torch.device("cpu"), seconds)
    names = [figure.name for figure in bench.few_rows(1e9)]
    assert len(names) == len(computed) == 4 * 2 * 4  # products, rows, and ways to compute them
    assert names[:2] == [
        "queries, keys and values, 1 rows, cuBLAS",
        "queries, keys and values, 1 rows, kernel, 64 x 128, 4 stages",
    ]
