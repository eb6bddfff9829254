"""Models of Triton's TensorRT-LLM repositories without TensorRT-LLM: their settings become our own engine's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.tensor import TensorSpec
from charonia.engine.client.llm import ignore_progress
from charonia.extras.trtllm.build import memory_needed, tensorrt_llm_model
from charonia.extras.trtllm.own_engine import computes_here, read_own_settings

YAML = """
model: {model}
max_batch_size: 16
cuda_graph_config: {{}}
kv_cache_config: {{enable_block_reuse: false, max_tokens: 100, dtype: fp8}}
triton_config: {{decoupled: true, max_batch_size: {size}}}
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    return str(tmp_path / "hf")


def test_settings_of_a_config(checkpoint: str, tmp_path: Path) -> None:
    given = {
        "gpt_model_path": checkpoint,
        "max_tokens_in_paged_kv_cache": "100",
        "batch_scheduler_policy": "max_utilization",
        "enable_chunked_context": "true",
        "max_attention_window_size": "${max_attention_window_size}",
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "max_beam_width": "4",
        "device": "cpu",
    }
    assert computes_here(str(tmp_path), given)
    assert read_own_settings(str(tmp_path), given) == (
        {"model": checkpoint, "admission": "optimistic", "device": "cpu", "kv_cache_blocks": 6},
        ("kv_cache_free_gpu_mem_fraction (no GPU computes)", "max_beam_width"),
    )
    with pytest.raises(InvalidArgument, match="'kv_cache_tokens' must be a whole number of at least 1, got 'many'"):
        read_own_settings(str(tmp_path), given | {"max_tokens_in_paged_kv_cache": "many"})


def test_sizes_of_a_cache_of_adapters_ask_for_them(checkpoint: str, tmp_path: Path) -> None:
    given = {"gpt_model_path": checkpoint, "lora_cache_max_adapter_size": "16"}
    unset = {"lora_cache_host_memory_bytes": "${lora_cache_host_memory_bytes}"}
    found = read_own_settings(str(tmp_path), given | unset)
    assert found == ({"model": checkpoint, "enable_lora": "true", "max_lora_rank": "16"}, ())
    found = read_own_settings(str(tmp_path), given | {"lora_cache_host_memory_bytes": "1000", "max_lora_rank": "8"})
    assert found.parameters == {
        "model": checkpoint,
        "enable_lora": "true",
        "max_lora_rank": "8",
        "max_lora_bytes": "1000",
    }
    found = read_own_settings(str(tmp_path), given | {"enable_lora": "false"})
    assert found.parameters == {"model": checkpoint, "enable_lora": "false"}
    found = read_own_settings(
        str(tmp_path), {"gpt_model_path": checkpoint, "enable_lora": "true", "lora_modules": "{}"}
    )
    assert found == ({"model": checkpoint, "enable_lora": "true", "lora_modules": "{}"}, ())
    assert "enable_lora" not in read_own_settings(str(tmp_path), {"gpt_model_path": checkpoint} | unset).parameters


def test_settings_of_a_yaml(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(YAML.format(model=checkpoint, size=0))
    assert computes_here(str(tmp_path), {})
    assert read_own_settings(str(tmp_path), {"block_size": "32"}) == (
        {"model": checkpoint, "max_num_seqs": 16, "prefix_caching": False, "block_size": "32", "kv_cache_blocks": 3},
        ("cuda_graph_config", "kv_cache_dtype"),
    )


def test_a_cache_in_fp8_is_kept_where_a_gpu_computes(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(YAML.format(model=checkpoint, size=0))
    found = read_own_settings(str(tmp_path), {"device": "cuda"})
    assert found.parameters["kv_cache_dtype"] == "fp8"
    assert found.idle == ("cuda_graph_config",)


def test_what_our_engine_cannot_read_is_refused_with_the_way_out(checkpoint: str, tmp_path: Path) -> None:
    for name, content in (("config.json", {"pretrained_config": {}}), ("rank0.engine", {})):
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(InvalidArgument, match=r"is an engine .*: install it .* the Hugging Face directory"):
            read_own_settings(str(tmp_path), {"gpt_model_path": str(tmp_path)})
        (tmp_path / name).unlink()
    with pytest.raises(InvalidArgument, match="'gpt_model_path' is not set, and there is no checkpoint in"):
        read_own_settings(str(tmp_path), {"gpt_model_path": "${engine_dir}"})


def test_one_line_names_what_has_no_effect(checkpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inputs = tuple(TensorSpec(name, "INT32", (1,)) for name in ("input_ids", "input_lengths", "request_output_len"))
    written = ModelConfig("m", "1", "tensorrtllm", inputs=inputs, max_batch_size=8, decoupled=True)
    given = {"gpt_model_path": checkpoint, "executor": "fake", "num_nodes": "1", "multi_block_mode": "true"}
    with caplog.at_level(logging.WARNING):
        model: Any = tensorrt_llm_model(written, str(tmp_path), given, ignore_progress)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': parameters without effect here: multi_block_mode, num_nodes"
    ]
    assert (model.config.backend, model.config.max_batch_size, model.config.decoupled) == ("tensorrtllm", 8, True)
    assert memory_needed(str(tmp_path), given, ()) == ()


def test_llmapi_has_one_prompt_a_request(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(YAML.format(model=checkpoint, size=4))
    with pytest.raises(InvalidArgument, match="'m' must have max_batch_size 0: a request has one prompt"):
        tensorrt_llm_model(ModelConfig("m", "1", "llmapi"), str(tmp_path), {"executor": "fake"}, ignore_progress)
    (tmp_path / "model.yaml").write_text(YAML.format(model=checkpoint, size=0))
    given = {"executor": "fake", "kv_cache_dtype": "auto"}
    model = tensorrt_llm_model(ModelConfig("m", "1", "llmapi"), str(tmp_path), given, ignore_progress)
    assert model.config.decoupled
