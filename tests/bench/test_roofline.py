"""The limit's formula against figures worked out by hand, and against those the formula was first written down with."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

from charonia.bench.checkpoint import LLAMA_ONE_BILLION, QWEN2_HALF_BILLION
from charonia.bench.roofline import MachinePeaks, ModelDemand, OfflineJob, Precision, least_seconds, roofline_speed
from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import ModelSpec

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}


def spec_of(config: dict[str, object]) -> ModelSpec:
    return read_spec({**config, "architectures": [ARCHITECTURES[str(config["model_type"])]]}, "config.json")


def test_a_step_takes_as_long_as_its_reading_or_its_arithmetic_whichever_is_longer() -> None:
    demand = ModelDemand(layers=100, head=10, weight_bytes=1000, windows=(None, 4), kv_bytes=(1, 1))
    job = OfflineJob(sequences=2, prompt=5, new=3)
    prompt_ops, step_ops = 2 * 2 * (5 * 100 + 10), 2 * 2 * 110
    assert demand.context_bytes(6) == 6 + 4
    by_reading = MachinePeaks(read=10.0, peak=1e9)
    assert least_seconds(demand, job, by_reading) == pytest.approx(
        prompt_ops / 1e9 + (1000 + 2 * (6 + 4)) / 10 + (1000 + 2 * (7 + 4)) / 10
    )
    by_arithmetic = MachinePeaks(read=1e9, peak=10.0)
    assert least_seconds(demand, job, by_arithmetic) == pytest.approx(prompt_ops / 10 + 2 * step_ops / 10)
    assert roofline_speed(demand, job, by_arithmetic) == pytest.approx(2 * 3 / (prompt_ops / 10 + 2 * step_ops / 10))


@pytest.mark.parametrize(
    ("precision", "peak", "expected"), [("bf16", 425e9, (33, 98, 177, 177)), ("int8", 857e9, (66, 196, 356, 356))]
)
def test_the_limits_of_the_half_billion_shape(precision: Precision, peak: float, expected: tuple[int, ...]) -> None:
    demand = ModelDemand.of(spec_of(QWEN2_HALF_BILLION), precision)
    assert 2 * demand.layers == pytest.approx(0.716e9, rel=1e-3)
    assert 2 * (demand.layers + demand.head) == pytest.approx(0.988e9, rel=1e-3)
    assert sum(demand.kv_bytes) == demand.token_bytes == 12 * 1024
    machine = MachinePeaks(read=36e9, peak=peak)
    limits = [roofline_speed(demand, OfflineJob(sequences, 128, 64), machine) for sequences in (1, 4, 16, 32)]
    assert limits == pytest.approx(expected, abs=0.6)


def test_the_one_billion_shape_has_its_weights() -> None:
    demand = ModelDemand.of(spec_of(LLAMA_ONE_BILLION), "int8")
    assert demand.weight_bytes == pytest.approx(1.236e9, rel=1e-3)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5", "lfm2", "granite-hybrid", "gemma4-small"])
def test_the_demand_of_a_decoder_is_what_its_checkpoint_holds(making: ModuleType, tmp_path: Path, kind: str) -> None:
    """Every matrix of its layers, and for a sequence each number of its states, read and written."""
    directory = making.write_checkpoint(tmp_path, making.CONFIGS[kind])
    spec = read_spec(json.loads((directory / "config.json").read_text()), "here")
    tensors = load_file(directory / "model.safetensors")
    parts = ".layers.", ".per_layer_model_projection."
    matrices = {name: tensor for name, tensor in tensors.items() if any(part in name for part in parts)}
    weights = sum(tensor.numel() for tensor in matrices.values() if tensor.dim() == 2)
    states = [state for state in spec.states if state is not None]
    state_numbers = sum(state.heads * state.rows * state.columns for state in states)
    demand = ModelDemand.of(spec, "bf16")
    assert demand.layers == weights + 4 * state_numbers
    assert demand.weight_bytes == 2 * (weights + demand.head)
    assert demand.token_bytes == 2 * spec.token_numbers
    keys = 2 * sum(spec.kept(kind).numbers for kind in spec.attention if kind is not None)
    assert demand.context_bytes(1) - 2 * demand.state_bytes == keys
    assert demand.context_bytes(3) == 3 * keys + 2 * sum(state.bytes(2) for state in states)


def test_a_mixture_of_experts_has_no_known_limit() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "vocab_size": 99, "num_local_experts": 4, "num_experts_per_tok": 2}
    mixtral = spec_of({"model_type": "mixtral", "max_position_embeddings": 64, **sizes, **experts})
    with pytest.raises(InvalidArgument, match="MixtralForCausalLM: limits are known for dense models only"):
        ModelDemand.of(mixtral, "bf16")
