"""From settings to an `LLM`: of a checkpoint or a prebuilt engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import CharoniaError, InvalidArgument, NotFound
from charonia.engine.options import parse_settings
from charonia.extras.trtllm.llm_factory import TrtllmModelInfo, make_llm, read_model_info
from charonia.extras.trtllm.options import TrtllmOptions

MODEL = TrtllmModelInfo("/m", 100, 64)
ENGINE = TrtllmModelInfo("/e", 100, 64, engine=True, max_num_seqs=4)


pytestmark = pytest.mark.usefixtures("package")


def made(model: TrtllmModelInfo = MODEL, **options: Any) -> dict[str, Any]:
    """What the fake `LLM` was given."""
    llm: Any = make_llm(model, parse_settings(options, TrtllmOptions))
    return llm.given  # type: ignore[no-any-return]


def test_what_is_passed_where_nothing_was_asked_for() -> None:
    arguments = made()
    assert arguments.pop("kv_cache_config").enable_block_reuse is True
    assert arguments == {
        "model": "/m",
        "tokenizer": "/m",
        "trust_remote_code": False,
        "enable_chunked_prefill": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_batch_size": 256,
        "max_num_tokens": 8192,
        "max_seq_len": 64,
        "stream_interval": 1,
        "enable_iter_perf_stats": True,
    }


def test_every_setting_arrives() -> None:
    arguments = made(
        tokenizer="/t",
        trust_remote_code="true",
        dtype="float16",
        tensor_parallel_size="2",
        pipeline_parallel_size="3",
        moe_expert_parallel_size="4",
        max_num_seqs="5",
        max_num_batched_tokens="6",
        chunked_prefill="false",
        admission="optimistic",
        guided_decoding_backend="xgrammar",
        stream_interval="7",
    )
    expected = {"tokenizer": "/t", "trust_remote_code": True, "dtype": "float16", "tensor_parallel_size": 2}
    expected |= {"pipeline_parallel_size": 3, "moe_expert_parallel_size": 4, "max_batch_size": 5, "max_num_tokens": 6}
    expected |= {"enable_chunked_prefill": False, "guided_decoding_backend": "xgrammar", "stream_interval": 7}
    assert {name: arguments[name] for name in expected} == expected
    assert arguments["scheduler_config"].capacity_scheduler_policy == "MAX_UTILIZATION"


def test_the_cache() -> None:
    cache = made(
        prefix_caching="false",
        block_size="64",
        kv_cache_dtype="fp8",
        kv_cache_memory_fraction="0.5",
        kv_cache_bytes="1000",
        kv_cache_tokens="2000",
        kv_cache_host_bytes="3000",
    )["kv_cache_config"]
    expected = {"enable_block_reuse": False, "tokens_per_block": 64, "dtype": "fp8", "free_gpu_memory_fraction": 0.5}
    expected |= {"max_gpu_total_bytes": 1000, "max_tokens": 2000, "host_cache_size": 3000}
    assert cache.given == expected


def adapter(directory: Path, name: str, **config: Any) -> None:
    (directory / name).mkdir()
    (directory / name / "adapter_config.json").write_text(json.dumps(config))


def test_adapters_say_what_they_need(tmp_path: Path) -> None:
    adapter(tmp_path, "a", r=8, target_modules=["q_proj", "v_proj"])
    adapter(tmp_path, "b", r=16, target_modules=["model.layers.0.self_attn.q_proj", "down_proj"])
    modules = json.dumps({name: str(tmp_path / name) for name in "ab"})
    arguments = made(lora_modules=modules)
    assert arguments["enable_lora"] is True
    config = arguments["lora_config"]
    assert config.lora_target_modules == ["attn_q", "attn_v", "mlp_4h_to_h"]
    assert (config.max_lora_rank, config.max_loras) == (16, 2)
    config = made(lora_modules=modules, max_lora_rank="64", max_loras="1")["lora_config"]
    assert (config.max_lora_rank, config.max_loras) == (64, 1)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "has no adapter_config.json"),
        ({"r": 8}, "adapter 'a' must list its target_modules, got None"),
        ({"r": 8, "target_modules": "all-linear"}, "got 'all-linear'"),
        ({"r": 8, "target_modules": ["q_proj", "lm_head"]}, "changes lm_head, which TensorRT-LLM cannot"),
        ({"target_modules": ["q_proj"]}, r"no rank \(r\)"),
    ],
)
def test_an_adapter_that_cannot_be_served(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    adapter(tmp_path, "a", **config)
    with pytest.raises(InvalidArgument, match=says) as refusal:
        made(lora_modules=json.dumps({"a": str(tmp_path / "a")}))
    assert refusal.value.field == "lora_modules"


def test_speculation() -> None:
    config = made(speculative_config='{"decoding_type": "NGram", "max_draft_len": 4}')["speculative_config"]
    assert (type(config).__name__, config.max_draft_len) == ("NGramDecodingConfig", 4)
    draft = "speculative_model_dir"
    asked = {"decoding_type": "Draft_Target", "max_draft_len": 4, draft: "/d"}
    assert getattr(made(speculative_config=json.dumps(asked))["speculative_config"], draft) == "/d"
    for wrong, says in [
        ({}, None),
        ({"decoding_type": "Magic"}, "must be one of NGram, Draft_Target, MTP, .*, got 'Magic'"),
        ({"max_draft_len": 4}, "got None"),
        ({"decoding_type": "NGram", "max_draft": 4}, "NGram has no 'max_draft'; known are max_draft_len"),
    ]:
        if says is None:
            assert "speculative_config" not in made(speculative_config=json.dumps(wrong))
            continue
        with pytest.raises(InvalidArgument, match=says) as refusal:
            made(speculative_config=json.dumps(wrong))
        assert refusal.value.field == "speculative_config"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"speculative_config": "[1]"}, "speculative_config"),
        ({"speculative_config": "{"}, "speculative_config"),
        ({"lora_modules": '{"a": 1}'}, "lora_modules"),
        ({"max_num_seqs": "0"}, "max_num_seqs"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"fake_vocab_size": "3"}, "fake_vocab_size"),
    ],
)
def test_settings_that_are_wrong_are_named_before_anything_loads(options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field) as refusal:
        parse_settings(options, TrtllmOptions)
    assert refusal.value.field == field


def test_the_sampler_can_be_chosen() -> None:
    assert made(sampler_type="TRTLLMSampler")["sampler_type"] == "TRTLLMSampler"


def test_a_prebuilt_engine(package: Any) -> None:
    given = made(ENGINE, tokenizer="/t")
    assert package.made[-1].__class__ is package.modules["tensorrt_llm._tensorrt_engine"].LLM
    assert given["tokenizer"] == "/t"
    assert not {"max_batch_size", "enable_chunked_prefill"} & given.keys()
    assert made(ENGINE, tokenizer="/t", chunked_prefill="true")["enable_chunked_prefill"] is True


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "tokenizer"),
        ({"dtype": "float16"}, "dtype"),
        ({"block_size": 64}, "block_size"),
        ({"sampler_type": "TRTLLMSampler"}, "sampler_type"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_a_prebuilt_engine_fixed_cannot_be_set(options: dict[str, Any], field: str) -> None:
    asked = replace(TrtllmOptions(tokenizer="/t"), **options) if options else TrtllmOptions()
    with pytest.raises(InvalidArgument, match=field) as refusal:
        make_llm(ENGINE, asked)
    assert refusal.value.field == field


# What is read of a model before


def write(directory: Path, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_a_checkpoint(tmp_path: Path) -> None:
    model = write(tmp_path, vocab_size=10, max_position_embeddings=20)
    assert read_model_info(model, None) == TrtllmModelInfo(model, 10, 20)
    assert read_model_info(model, 30).max_model_len == 30
    seeing = write(tmp_path, vocab_size=1, text_config={"vocab_size": 11, "max_position_embeddings": 22})
    assert read_model_info(seeing, None) == TrtllmModelInfo(model, 11, 22)
    assert read_model_info(write(tmp_path, vocab_size=10), 5).max_model_len == 5


def test_weights_of_a_hub_id_are_for_tensorrt_llm_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, vocab_size=10, max_position_embeddings=20)
    monkeypatch.setattr("charonia.extras.trtllm.llm_factory.locate_checkpoint", lambda model: tmp_path)
    assert read_model_info("owner/name", None) == TrtllmModelInfo("owner/name", 10, 20)


def test_an_engine(tmp_path: Path) -> None:
    built = {"max_seq_len": 20, "max_batch_size": 4}
    model = write(tmp_path, pretrained_config={"vocab_size": 10}, build_config=built)
    assert read_model_info(model, None) == TrtllmModelInfo(model, 10, 20, engine=True, max_num_seqs=4)
    assert read_model_info(model, 15).max_model_len == 15
    with pytest.raises(InvalidArgument, match="built for: 20") as refusal:
        read_model_info(model, 21)
    assert refusal.value.field == "max_model_len"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no vocab_size"),
        ({"vocab_size": "many"}, "no vocab_size"),
        ({"vocab_size": 5}, "no max_position_embeddings; set max_model_len"),
        ({"vocab_size": 5, "text_config": []}, "no vocab_size"),
        ({"pretrained_config": {}, "build_config": {"max_seq_len": 3}}, "no vocab_size"),
        ({"pretrained_config": {"vocab_size": 3}, "build_config": 3}, "no max_seq_len"),
    ],
)
def test_a_config_that_lacks_a_number(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        read_model_info(write(tmp_path, **config), None)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as refusal:
        read_model_info(str(tmp_path / "no"), None)
    assert isinstance(refusal.value, CharoniaError)
