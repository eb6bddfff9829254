"""What model.json asks of our own engine, and what is said of the rest."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.engine import build
from charonia.engine.client.llm import ignore_progress
from charonia.engine.options import EngineOptions, parse_settings
from charonia.engine.vllm import model_json
from charonia.engine.vllm.arguments import OWN_NAMES
from charonia.engine.vllm.build import memory_needed, vllm_model
from charonia.engine.vllm.model_json import read_model_json

HUB = {"model": "owner/name"}


def write(directory: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "model.json").write_text(text)
    return directory


def read(directory: Path, content: Any, **parameters: str) -> Any:
    return read_model_json(str(write(directory, content)), parameters)


def test_arguments_become_our_settings(tmp_path: Path) -> None:
    given = {
        "revision": "main",
        "dtype": "half",
        "quantization": None,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "uni",
        "max_model_len": "4096",
        "num_gpu_blocks_override": 64,
        "kv_cache_memory_bytes": 1000,
        "enable_prefix_caching": "false",
        "limit_mm_per_prompt": {"image": 4},
        "mm_processor_kwargs": {"max_pixels": 1000},
    }
    found = read(tmp_path, HUB | given, threads="2", REPORT_CUSTOM_METRICS="true", ENABLE_VLLM_HEALTH_CHECK="yes")
    assert found.parameters == {
        "model": "owner/name@main",
        "dtype": "float16",
        "tensor_parallel_size": 2,
        "max_model_len": 4096,
        "kv_cache_blocks": 64,
        "kv_cache_bytes": 1000,
        "prefix_caching": False,
        "limit_mm_per_prompt": '{"image":4}',
        "mm_processor_kwargs": '{"max_pixels":1000}',
        "threads": "2",
    }
    assert not found.idle
    parse_settings(dict.fromkeys(OWN_NAMES.values()), EngineOptions)


def test_speculation_that_is_not_served_changes_no_text_and_is_said(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    found = read(tmp_path, HUB | {"speculative_config": ngram})
    assert json.loads(found.parameters["speculative_config"]) == ngram
    assert not found.idle
    found = read(tmp_path, HUB | {"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}})
    assert found.parameters == HUB
    assert "the text is the same: speculative_config: method must be one of" in found.idle["speculative_config"]
    assert read(tmp_path, HUB | {"speculative_config": None}) == (HUB, {})


def test_a_checkpoint_is_found_beside_the_file_or_anywhere(tmp_path: Path) -> None:
    checkpoint, version = tmp_path / "owner" / "name", tmp_path / "1"
    checkpoint.mkdir(parents=True)
    version.mkdir()
    for model in (str(checkpoint), "../owner/name"):
        found = read(version, {"model": model, "tokenizer": "../owner"}).parameters
        assert found == {"model": str(checkpoint), "tokenizer": str(checkpoint.parent)}
    assert read(version, {"model": "../owner/name", "revision": "main", "tokenizer": ""}).parameters == {
        "model": str(checkpoint)
    }
    assert read(version, HUB).parameters == HUB
    assert read(tmp_path, HUB).parameters == {"model": str(checkpoint)}


def test_what_has_no_effect_is_named_and_wishes_for_nothing_are_not(tmp_path: Path) -> None:
    nothing = {"enforce_eager": False, "swap_space": 0, "load_format": "auto", "hf_overrides": {}, "task": "generate"}
    assert read(tmp_path, HUB | nothing).idle == {}
    idle = read(tmp_path, HUB | {"disable_log_stats": "true", "tensor_parralel_size": 2}, GPU_DEVICE_IDS="1").idle
    assert list(idle) == ["disable_log_stats", "tensor_parralel_size", "GPU_DEVICE_IDS"]
    assert idle["tensor_parralel_size"] == "not known here; did you mean 'tensor_parallel_size'?"


@pytest.mark.parametrize(("gpus", "device"), [((), None), ((0,), "cpu")])
def test_a_share_of_gpus_is_none_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], device: str | None
) -> None:
    monkeypatch.setattr(build, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(model_json, "usable_gpus", lambda: gpus)
    asked = HUB | {"gpu_memory_utilization": 0.8, "device": device}
    found = read(tmp_path, asked)
    assert "gpu_memory_utilization" not in found.parameters
    assert list(found.idle) == ["gpu_memory_utilization"]
    monkeypatch.setattr(model_json, "usable_gpus", lambda: (0,))
    assert read(tmp_path, asked | {"device": "auto"}).parameters["gpu_memory_utilization"] == 0.8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"model.json is not JSON"),
        ("[]", r"model.json holds no JSON object"),
        ({"dtype": "auto"}, r"model.json: it names no model: set 'model'"),
        ({"model": None}, r"model.json: it names no model"),
        ({"model": 3}, r"model.json: argument 'model' must be a directory or a hub id, got 3"),
        ({"model": "./absent"}, r"model.json: argument 'model': there is no directory .*absent"),
        (HUB | {"tokenizer": "/absent"}, r"argument 'tokenizer': there is no directory /absent"),
        (HUB | {"max_model_len": "long"}, r"model.json: argument 'max_model_len' must be an integer"),
        (HUB | {"max_num_seqs": [1]}, r"argument 'max_num_seqs' must be an integer"),
        (HUB | {"max_num_seqs": True}, r"argument 'max_num_seqs' must be an integer"),
        (HUB | {"max_num_seqs": 0}, r"argument 'max_num_seqs' must be an integer >= 1"),
        (HUB | {"gpu_memory_utilization": 9}, r"argument 'gpu_memory_utilization' must be a number <= 1"),
        (HUB | {"enable_prefix_caching": "x"}, r"argument 'enable_prefix_caching' must be a boolean"),
        (
            HUB | {"quantization": "bitsandbytes"},
            r"argument 'quantization' must be one of none, int8, int4, awq, .* got",
        ),
        (HUB | {"rope_scaling": {"factor": 2}}, r"argument 'rope_scaling' is not served: change the checkpoint's"),
        (HUB | {"task": "embed"}, r"argument 'task' is not served: the model is to generate text"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read(tmp_path, content)


def test_a_missing_file_and_a_wrong_parameter_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"there is no .*model.json: it has the engine arguments"):
        read_model_json(str(tmp_path), {})
    write(tmp_path, HUB)
    with pytest.raises(InvalidArgument, match="unknown parameter 'bogus'"):
        memory_needed(str(tmp_path), {"bogus": "1"}, ())


def test_the_log_names_what_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"model": ".", "swap_space": 4, "num_gpu_blocks_override": 8})
    with caplog.at_level(logging.WARNING):
        model = vllm_model(ModelConfig("gpt", "1", "vllm"), str(tmp_path), {"executor": "fake"}, ignore_progress)
    assert "model 'gpt': engine arguments of vLLM without effect here: swap_space (what has no room" in caplog.text
    assert (model.config.backend, model.config.decoupled, model.config.max_batch_size) == ("vllm", True, 0)


def test_adapters_are_those_of_the_file_beside_it(tmp_path: Path) -> None:
    lora = {"enable_lora": "true", "max_lora_rank": 16, "max_loras": 4, "max_cpu_loras": 8}
    with pytest.raises(InvalidArgument, match=r"with enable_lora, there must be .*multi_lora.json"):
        read(tmp_path, HUB | lora)
    (tmp_path / "near").mkdir()
    file = tmp_path / "multi_lora.json"
    file.write_text(json.dumps({"near": "near", "hub": "owner/name"}))
    found = read(tmp_path, HUB | lora)
    assert json.loads(found.parameters.pop("lora_modules")) == {"near": str(tmp_path / "near"), "hub": "owner/name"}
    assert found.parameters == HUB | {"enable_lora": True, "max_lora_rank": 16, "max_loras": 4}
    assert found.idle == {"max_cpu_loras": "the parameter 'max_lora_bytes' in config.pbtxt"}
    for content, text in (
        ({"a": "./none"}, "argument 'a': there is no directory"),
        ({"a": 3}, "argument 'a' must be"),
        ([], "holds no JSON object"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(InvalidArgument, match=text):
            read(tmp_path, HUB | lora)
    idle = read(tmp_path, HUB | lora | {"enable_lora": False}).idle
    assert (idle["max_loras"], idle["max_lora_rank"]) == ("enable_lora is not set",) * 2
